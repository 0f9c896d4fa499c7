"""The planning half of the package runs where jax is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

IMPORT_ALL = """
import importlib, pkgutil, sys

for name in ("cost", "schedule", "fill", "plan", "judge"):
    name = "optimus_jax." + name
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
            print(module.name)
taken = {"jax", "jaxlib", "flax"} & sys.modules.keys()
assert not taken, f"imported {sorted(taken)}"
"""


def test_planning_imports_no_jax() -> None:
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert "optimus_jax.schedule.validate" in run.stdout.split()
