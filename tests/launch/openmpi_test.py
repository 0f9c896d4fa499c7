"""Training under a real mpirun."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.train_test import QUICK, TINY, losses

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("mpirun"), reason="no mpirun: apt-get install openmpi-bin"),
]


@pytest.mark.parametrize("processes", [2, 4])
def test_mpirun_trains(tmp_path: pathlib.Path, processes: int) -> None:
    options = ["-n", str(processes), "--oversubscribe"]
    if os.geteuid() == 0:
        options.append("--allow-run-as-root")
    train = [*TINY, f"--config.parallel.pp={processes}", f"--workdir={tmp_path}"]
    done = subprocess.run(
        ["bash", "launch/openmpi.sh", *options, "--", *train],
        cwd=ROOT,
        env=os.environ | QUICK | {"OPTIMUS_PYTHON": sys.executable, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(losses(tmp_path)) == 8
    assert done.stdout.count("step 8/8") == 1, "the first process speaks"
