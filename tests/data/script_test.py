"""launch/data.sh with stand-ins for apt-get and dpkg-deb: a whole folder, or none and words."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOOLS = ("bash", "touch", "mkdir", "mktemp", "rm", "cat", "find", "cp", "mv", "chmod", "dirname")
PACKAGE = "dataset-fashion-mnist"
DOWNLOAD = f"touch {PACKAGE}_1_all.deb"
UNPACK = f"""
mkdir -p "$3/usr/share/datasets/fashion-mnist" "$3/usr/share/doc/{PACKAGE}"
echo pictures >"$3/usr/share/datasets/fashion-mnist/pictures.gz"
echo spoken >"$3/usr/share/datasets/fashion-mnist/spoken.ogg"
echo free >"$3/usr/share/doc/{PACKAGE}/copyright"
"""


@pytest.fixture
def place(tmp_path: pathlib.Path) -> pathlib.Path:
    """A repository with the script alone, and a folder of the only programs that it may find."""
    (tmp_path / "launch").mkdir()
    shutil.copy(ROOT / "launch" / "data.sh", tmp_path / "launch")
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / "bin" / tool).symlink_to(found)
    return tmp_path


def stand_in(place: pathlib.Path, tool: str, lines: str) -> None:
    path = place / "bin" / tool
    path.write_text(f'#!/bin/bash\nset -e\necho "$@" >>{place}/calls\n{lines}\n')
    path.chmod(0o755)


def run(place: pathlib.Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/bash", str(place / "launch" / "data.sh"), *words],
        env={"PATH": str(place / "bin")},
        capture_output=True,
        text=True,
        timeout=60,
    )


def left(place: pathlib.Path) -> list[str]:
    return sorted(path.name for path in (place / "datasets").glob("*")) + sorted(
        path.name for path in (place / "datasets").glob(".*")
    )


def test_a_package_is_unpacked_once(place: pathlib.Path) -> None:
    stand_in(place, "apt-get", DOWNLOAD)
    stand_in(place, "dpkg-deb", UNPACK)
    done = run(place, "fashion")
    assert done.returncode == 0, done.stderr
    assert left(place) == ["fashion"]
    found = sorted(path.name for path in (place / "datasets" / "fashion").iterdir())
    assert found == ["COPYRIGHT", "pictures.gz"]
    calls = (place / "calls").read_text()
    assert f"download {PACKAGE}" in calls
    assert run(place, "fashion").stdout == "data: datasets/fashion is there already\n"
    assert (place / "calls").read_text() == calls


@pytest.mark.parametrize(
    ("download", "unpack", "wanted"),
    [
        ("echo no such package >&2; exit 100", UNPACK, "could not be downloaded; `apt-get update`"),
        ("exit 0", "exit 2", "could not be unpacked"),
        (DOWNLOAD, UNPACK + "exit 2", "could not be unpacked"),
        (DOWNLOAD, 'mkdir -p "$3/usr"', "has no folder usr/share/datasets/fashion-mnist"),
    ],
)
def test_what_fails_leaves_nothing(
    place: pathlib.Path, download: str, unpack: str, wanted: str
) -> None:
    stand_in(place, "apt-get", download)
    stand_in(place, "dpkg-deb", unpack)
    done = run(place, "fashion")
    assert done.returncode == 1
    assert wanted in done.stderr
    assert left(place) == []
    if "no such" in download:
        assert "no such package" in done.stderr


@pytest.mark.parametrize("missing", ["apt-get", "dpkg-deb"])
def test_missing_programs_are_named(place: pathlib.Path, missing: str) -> None:
    for tool in {"apt-get", "dpkg-deb"} - {missing}:
        stand_in(place, tool, "exit 0")
    done = run(place, "fashion")
    assert done.returncode == 1
    assert f"data: {missing} is missing" in done.stderr and PACKAGE in done.stderr
    assert not (place / "datasets").exists()


@pytest.mark.parametrize("words", [[], ["cats"], ["fashion", "stamps"]])
def test_wrong_words_are_answered_with_the_usage(place: pathlib.Path, words: list[str]) -> None:
    done = run(place, *words)
    assert done.returncode == 2
    assert "usage: bash launch/data.sh fashion|stamps" in done.stderr
