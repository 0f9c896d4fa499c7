"""Training under a real mpirun."""

from __future__ import annotations

import os
import pathlib
import re
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
    train = [*TINY, f"--config.parallel.pp={processes}", f"--workdir={tmp_path}/run"]
    done = subprocess.run(
        ["bash", "launch/openmpi.sh", *options, "--", *train],
        cwd=ROOT,
        env=os.environ
        | QUICK
        | {"OPTIMUS_PYTHON": sys.executable, "JAX_PLATFORMS": "cpu"}
        | {"OPTIMUS_LOGS": str(tmp_path / "logs")}
        | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(losses(tmp_path / "run")) == 8
    assert done.stdout.count("step 8/8") == 1, "the first process speaks"
    (folder,) = (tmp_path / "logs").iterdir()
    files = sorted(path.relative_to(folder) for path in folder.glob("*/stdout"))
    assert [str(path) for path in files] == [f"rank.{n}/stdout" for n in range(processes)]
    said = [(folder / path).read_text() for path in files]
    (last,) = [line for line in said[0].splitlines() if "step 8/8" in line]
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", last), "lines begin with the time"
    assert not any("step 8/8" in text for text in said[1:])
