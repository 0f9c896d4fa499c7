"""The batch file on a real Slurm of two nodes: trains, is told to stop, is killed, goes on."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time

import pytest

from tests.conftest import ROOT
from tests.launch.one_machine import slurm as slurm  # a fixture
from tests.train_test import QUICK, TINY, losses

STEPS = 8
pytestmark = pytest.mark.slow


def submit(workdir: pathlib.Path, tasks: int, *more: str, wait: bool = True) -> int:
    """The exit code of the job, or without `wait` its number."""
    line = ["sbatch", "--parsable", f"--ntasks-per-node={tasks}", f"--chdir={workdir}"]
    line += ["--wait"] * wait + [f"--output={workdir}/job.out", str(ROOT / "launch/slurm.sbatch")]
    pp = f"--config.parallel.pp={2 * tasks}"
    environment = os.environ | QUICK | {"OPTIMUS_PYTHON": sys.executable, "JAX_PLATFORMS": "cpu"}
    environment |= {"PYTHONPATH": str(ROOT), "OPTIMUS_ROOT": str(ROOT)}
    environment["OPTIMUS_LOGS"] = str(workdir / "logs")
    environment["JAX_COMPILATION_CACHE_DIR"] = str(workdir / "cache")
    done = subprocess.run(
        [*line, *TINY, pp, f"--workdir={workdir}/run", *more],
        cwd=workdir,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if not wait:
        assert done.returncode == 0, done.stderr
        return int(done.stdout)
    said = (workdir / "job.out").read_text() if (workdir / "job.out").exists() else ""
    assert done.returncode in (0, 137), (done.stdout, done.stderr, said)
    return done.returncode


@pytest.mark.parametrize("tasks", [1, 2])
def test_a_job_trains_and_ends(slurm: None, tmp_path: pathlib.Path, tasks: int) -> None:
    assert submit(tmp_path, tasks) == 0
    assert len(losses(tmp_path / "run")) == STEPS


def test_a_job_killed_and_submitted_again_resumes_bit_for_bit(
    slurm: None, tmp_path: pathlib.Path
) -> None:
    more = "--config.train.steps=200", "--config.train.save_every=20"
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    assert submit(tmp_path / "whole", 1, *more) == 0
    job = submit(tmp_path / "killed", 1, *more, wait=False)
    committed = tmp_path / "killed" / "run" / "checkpoints" / "20"
    _await(committed.exists)
    # scancel would end the job's steps with SIGTERM first, at which they save
    subprocess.run(["pkill", "-KILL", "-f", f"workdir={tmp_path}/killed/run"], check=True)
    _await(lambda: not _queued(job))
    assert submit(tmp_path / "killed", 1, *more) == 0
    assert "resumed after step" in _all_output(tmp_path / "killed")
    assert losses(tmp_path / "killed" / "run") == losses(tmp_path / "whole" / "run")


def test_a_job_told_to_stop_saves_and_comes_back(slurm: None, tmp_path: pathlib.Path) -> None:
    """As before its time is up: SIGTERM for the tasks, then the queue again, then the rest."""
    long = "--config.train.steps=400", "--config.train.save_every=1000"
    job = submit(tmp_path, 1, *long, wait=False)
    _await(lambda: len(losses_so_far(tmp_path / "run")) > 3)
    subprocess.run(["scancel", "--signal=TERM", str(job)], check=True)
    _await(lambda: "back into the queue" in _all_output(tmp_path))
    assert any((tmp_path / "run" / "checkpoints").iterdir())
    _await(lambda: "resumed after step" in _all_output(tmp_path), 200)
    cancel_for_good(tmp_path, job)


def cancel_for_good(workdir: pathlib.Path, job: int, *first: str) -> None:
    """It saves, ends and does not come back."""
    before = len(_all_output(workdir))
    subprocess.run(["scancel", *first, str(job)], check=True)
    _await(lambda: not _queued(job))
    said = _all_output(workdir)[before:]
    assert "ended with code 143" in said, said
    assert ("not put back" in said) == (not first), said
    time.sleep(3)
    assert not _queued(job)
    steps = [int(path.name) for path in (workdir / "run" / "checkpoints").iterdir()]
    assert max(steps) == max(losses_so_far(workdir / "run")) + 1  # which count from 0


def test_a_job_that_may_not_come_back_does_not(slurm: None, tmp_path: pathlib.Path) -> None:
    long = "--config.train.steps=100000", "--config.train.save_every=100000"
    job = submit(tmp_path, 1, *long, wait=False)
    _await(lambda: len(losses_so_far(tmp_path / "run")) > 3)
    subprocess.run(["scontrol", "update", f"JobId={job}", "Requeue=0"], check=True)
    cancel_for_good(tmp_path, job, "--signal=TERM")


def losses_so_far(workdir: pathlib.Path) -> dict[int, float]:
    return losses(workdir) if (workdir / "metrics.jsonl").exists() else {}


def _all_output(folder: pathlib.Path) -> str:
    return "".join(path.read_text() for path in folder.glob("*.out"))


def _queued(job: int) -> bool:
    done = subprocess.run(["squeue", "-h", "-j", str(job)], capture_output=True, text=True)
    return bool(done.stdout.strip())


def _await(true, seconds: float = 150) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "time is up"
        time.sleep(0.2)
