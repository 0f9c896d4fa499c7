"""Processes of a run that are told to stop, stopped or killed: what the others do."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from optimus_jax.watchdog import EXIT_CODE
from tests.train_test import QUICK, await_step, command, losses, run

ENDLESS = "--config.train.steps=100000", "--config.train.save_every=100000"


@pytest.fixture
def two(tmp_path: pathlib.Path) -> Iterator[subprocess.Popen[str]]:
    """A run of two processes that has logged a step."""
    line = [sys.executable, "launch/local.py", "--processes=2", "--", *command(tmp_path, *ENDLESS)]
    line += ["--hang_s=5", "--config.train.log_every=10"]
    process = subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | QUICK
    )
    await_step(process)
    yield process
    process.kill()
    process.communicate()


def ranks(launcher: int) -> list[int]:
    """The process numbers of the launcher's children, in the order of their ranks."""
    children = pathlib.Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return sorted(map(int, children))


def test_sigterm_of_one_process_saves_in_all(
    two: subprocess.Popen[str], tmp_path: pathlib.Path
) -> None:
    os.kill(ranks(two.pid)[1], signal.SIGTERM)
    out, err = two.communicate(timeout=120)
    assert two.returncode == 143, out + err
    assert "saved; the same command resumes there" in out
    (step,) = (int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit())
    more = f"--config.train.steps={step + 2}"
    assert f"resumed after step {step}" in run(command(tmp_path, more)).stdout
    assert {step, step + 1} <= losses(tmp_path).keys()


def test_a_stopped_process_ends_the_run_with_the_watchdogs_code(
    two: subprocess.Popen[str], tmp_path: pathlib.Path
) -> None:
    _, second = ranks(two.pid)
    began = time.monotonic()
    os.kill(second, signal.SIGSTOP)
    out, err = two.communicate(timeout=120)
    assert two.returncode == EXIT_CODE, out + err
    assert time.monotonic() - began < 5 + 10 + 10 + 20  # the limit, patience, grace, and some
    assert "the run hangs at step" in err
    assert "no word from process 1: stopped, dead or without the run's folder" in err
    assert "process 0: step of step" in err
    assert (tmp_path / "hang" / "process_0.stacks.txt").stat().st_size


def test_sigterm_of_a_single_process_saves(tmp_path: pathlib.Path) -> None:
    process = subprocess.Popen(
        command(tmp_path, *ENDLESS), stdout=subprocess.PIPE, text=True, env=os.environ | QUICK
    )
    await_step(process)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 143, out
    assert "saved; the same command resumes there" in out
