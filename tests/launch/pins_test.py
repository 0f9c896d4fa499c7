"""The pinned packages go together and can be had, for CPUs and for CUDA, on each Python."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from optimus_jax.gpu.environment import NO_INDEX, UNREACHABLE
from tests.conftest import ROOT

PYTHONS = ("3.11", "3.12", "3.13")
DRY = ["install", "--dry-run", "--ignore-installed", "-q", "--disable-pip-version-check"]


def pins(gpus: str = "", folder: pathlib.Path | None = None, *more: str) -> list[Requirement]:
    """What launch/setup.sh would install on a machine whose nvidia-smi says `gpus`."""
    path = os.environ["PATH"]
    if folder:
        (folder / "nvidia-smi").write_text(f"#!/bin/sh\necho '{gpus}'\n")
        (folder / "nvidia-smi").chmod(0o755)
        path = f"{folder}:{path}"
    done = subprocess.run(
        ["bash", "launch/setup.sh", "--pins", *more],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return [Requirement(line) for line in done.stdout.split("\n") if line]


def on(python: str, requirements: list[Requirement]) -> dict[str, Requirement]:
    """Those that hold on a Python, by name, without their conditions."""
    held = {}
    for wanted in requirements:
        if wanted.marker is None or wanted.marker.evaluate({"python_version": python}):
            assert wanted.name not in held, f"{wanted.name} is pinned twice on {python}"
            held[wanted.name] = Requirement(str(wanted).partition(";")[0])
    return held


@pytest.mark.parametrize("python", PYTHONS)
def test_every_package_has_one_pin_on_each_python(python: str) -> None:
    held = on(python, pins())
    assert all(re.fullmatch(r"==[\w.]+", str(wanted.specifier)) for wanted in held.values())
    assert {"jax", "flax", "optax", "orbax-checkpoint", "numpy", "ml-collections"} <= set(held)
    expected = "0.10.2" if python == "3.11" else "0.12"  # 0.10.2 is jax's last for Python 3.11
    assert str(held["jax"].specifier).startswith(f"=={expected}")


def test_cuda_comes_where_there_is_a_gpu_only(tmp_path: pathlib.Path) -> None:
    without = pins("No devices were found", tmp_path)
    assert all(not wanted.extras for wanted in without)
    beside = pins("GPU 0: Tesla T4 (UUID: GPU-0)", tmp_path)
    assert {w.name: w.extras for w in beside if w.extras} == {"jax": {"cuda12"}}
    assert [(w.name, w.specifier) for w in beside] == [(w.name, w.specifier) for w in without]


def test_cuda_comes_where_it_is_asked_for(tmp_path: pathlib.Path) -> None:
    """On a login node, in an image."""
    beside = pins("GPU 0: Tesla T4 (UUID: GPU-0)", tmp_path)
    assert pins("No devices were found", tmp_path, "--cuda") == beside
    done = subprocess.run(
        ["bash", "launch/setup.sh", "--gpu"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "usage: bash launch/setup.sh [--cuda] [--pins]\n"


def test_an_environment_with_cuda_keeps_it(tmp_path: pathlib.Path) -> None:
    """As when launch/test.sh runs on the login node where setup.sh --cuda did."""
    launch, python = tmp_path / "launch", tmp_path / ".venv" / "bin" / "python"
    launch.mkdir()
    python.parent.mkdir(parents=True)
    for name in ("requirements.txt", "launch/setup.sh", "launch/requirements-test.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    said = tmp_path / "said"
    python.write_text(f'#!/bin/sh\n[ "$3" = install ] && echo pip >> {said}\nexit 0\n')
    python.chmod(0o755)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment.pop("PYTHON", None)

    def setup(*words: str) -> str:
        line = ["bash", str(launch / "setup.sh"), *words]
        done = subprocess.run(line, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        installed = said.exists()
        said.unlink(missing_ok=True)
        return f"{'installs' if installed else 'keeps'} {done.stdout.rpartition('(')[2][:3]}"

    assert [setup(*words) for words in ([], [], ["--cuda"], [], ["--cuda"])] == [
        "installs CPU",
        "keeps CPU",
        "installs CUD",
        "keeps CUD",
        "keeps CUD",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS)
def test_pins_go_together_on_each_python(python: str, tmp_path: pathlib.Path) -> None:
    """Asked of that Python itself: from another one pip gets conditions and versions wrong."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    interpreter = sys.executable if python == here else shutil.which(f"python{python}")
    # pyenv has stand-ins for those that are installed but not chosen: they only complain
    if not interpreter or subprocess.run([interpreter, "-c", ""], capture_output=True).returncode:
        pytest.skip(f"no python{python} on the PATH runs")
    wanted = on(python, pins("GPU 0: Tesla T4 (UUID: GPU-0)", tmp_path)).values()
    line = [sys.executable, "-m", "pip", "--python", interpreter, *DRY, *map(str, wanted)]
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode and re.search(UNREACHABLE, done.stderr):
        pytest.skip(NO_INDEX)
    assert done.returncode == 0, done.stderr
