"""A run that hangs is ended, and said of each process where it stood."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import textwrap
import time

import pytest

from optimus_jax.watchdog import EXIT_CODE, START_S, TYPICAL, Stand, Watchdog, verdict
from tests.conftest import ROOT


def stand(rank: int, part: str = "step", step: int = 7, reaches: bool = True) -> Stand:
    return Stand(rank, part, step, 31.0, "train.py:1 in train", reaches)


@pytest.mark.parametrize(
    ("stands", "count", "wanted"),
    [
        (
            [stand(0), stand(2)],
            3,
            "no word from process 1: stopped, dead or without the run's folder",
        ),
        ([stand(0), stand(1, "data"), stand(2)], 3, "the others wait for process 1"),
        (
            [stand(0), stand(1), stand(2, reaches=False)],
            3,
            "process 2 cut off: cannot reach process 0",
        ),
        (
            [stand(0), *(stand(n, reaches=False) for n in (1, 2, 3))],
            4,
            "process 0 is cut off: none of the others can reach it",
        ),
    ],
)
def test_a_verdict_names_who_is_to_blame(stands: list[Stand], count: int, wanted: str) -> None:
    lines = verdict(stands, count)
    assert f"  {wanted}" in lines
    assert "process 0: step of step 7 for 31 s, at train.py:1 in train" in " ".join(lines)


def test_limits_are_learned(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    dog = Watchdog(tmp_path, 0, 1, hang_s=0.0)  # watches nothing, but counts
    dog.hang_s = 5.0
    assert dog.limit() == START_S
    for n in range(4):
        dog.enter("step", n)
        clock[0] += 2.0
        dog.enter("save", n)
        clock[0] += 100.0
    assert dog.limit() == TYPICAL * 2.0
    dog.hang_s = 50.0
    assert dog.limit() == 50.0
    dog.close()


HANGS = """
    import pathlib, sys, time
    from optimus_jax import watchdog
    watchdog.PATIENCE_S = 4.0
    rank, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
    if rank:
        time.sleep(1.0)  # so that the first has made way
    dog = watchdog.Watchdog(folder, rank, 3, hang_s=0.5)
    for n in range(3):
        dog.enter("step", n)
        time.sleep(0.01)
    dog.enter("data" if rank else "step", 3)
    time.sleep(60)
"""


def test_processes_end_with_a_code_of_their_own_and_say_where_they_stood(
    tmp_path: pathlib.Path,
) -> None:
    line = [sys.executable, "-c", textwrap.dedent(HANGS)]
    began = time.monotonic()
    started = [
        subprocess.Popen(
            [*line, str(rank), str(tmp_path)], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    said = [process.communicate(timeout=60)[1] for process in started]
    assert [process.returncode for process in started] == [EXIT_CODE] * 2
    assert time.monotonic() - began < 30
    assert "the run hangs at step 3; ended with code 75" in said[0]
    assert "no word from process 2" in "".join(said)
    stands = [json.loads((tmp_path / f"hang/process_{n}.json").read_text()) for n in (0, 1)]
    assert [(s["part"], s["step"]) for s in stands] == [("step", 3), ("data", 3)]
    stacks = (tmp_path / "hang/process_0.stacks.txt").read_text()
    assert 'File "<string>"' in stacks and "watchdog.py" in stacks
