"""The documentation: it builds, its links hold, and what is made from code is that of the code."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest
import yaml

from optimus_jax import config_reference
from tests.conftest import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))


def test_the_site_builds_and_its_links_hold(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("mkdocs")
    line = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "index.html").is_file()


@pytest.mark.parametrize("path", [*PAGES, ROOT / "README.md"], ids=lambda p: p.name)
def test_links_to_files_hold(path: pathlib.Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text()):
        if not target.startswith("http"):
            assert (path.parent / target).exists(), target


def test_every_page_is_in_the_navigation() -> None:
    def pages(node: object) -> list[str]:
        if isinstance(node, str):
            return [node]
        parts = node.values() if isinstance(node, dict) else node
        return [page for part in parts for page in pages(part)]  # type: ignore[union-attr]

    shown = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(shown) == [path.name for path in PAGES]


@pytest.mark.parametrize("path", [*PAGES, ROOT / "README.md"], ids=lambda p: p.name)
def test_files_and_commands_that_pages_name_exist(path: pathlib.Path) -> None:
    text = path.read_text()
    for name in re.findall(r"python -m (optimus_jax\.[\w.]+)", text):
        module = ROOT / name.replace(".", "/")
        assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file(), name
    for name in re.findall(r"(?:bash|python) ((?:launch|benchmarks)/[\w./]+)", text):
        assert (ROOT / name).is_file(), name
    for name in re.findall(r"--config=(configs/\w+\.py)", text):
        assert (ROOT / name).is_file(), name


def test_the_configuration_page_is_that_of_the_code() -> None:
    """Made anew by python -m optimus_jax.config_reference > docs/configuration.md."""
    assert (DOCS / "configuration.md").read_text() == config_reference.page()
