"""Ends a run that hangs, and says where each process stood.

A device that waits for a collective that never comes waits for ever: jax's heartbeat notices
processes that are dead or stopped, not those that are stuck. So a thread of each process looks at
the clock. If a part of a step takes longer than its limit, the process writes where it stands into
hang/ of the run's folder, waits for the others to do so, says what it read of them and ends with
EXIT_CODE. A process that wrote nothing is stopped, dead or without the folder.
"""

from __future__ import annotations

import collections
import dataclasses
import faulthandler
import json
import os
import pathlib
import shutil
import socket
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Sequence

from optimus_jax.files import replace_text
from optimus_jax.processes import ADDRESS

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: the same command may well succeed
FOLDER = "hang"
START_S = 3600.0  # compiling, restoring and the first step
TYPICAL = 20  # a step of so many times the median is late
PATIENCE_S = 10.0  # for the others to write where they stand
_LOOK_S, _ASLEEP_S = 0.25, 5.0
_SHOWN = 16  # processes named in a verdict


@dataclasses.dataclass(frozen=True)
class Stand:
    """Where a process stood: in which part of which step, for how long, at which line of Python,
    and whether it could still connect to process 0."""

    rank: int
    part: str
    step: int
    seconds: float
    line: str
    reaches: bool

    def __str__(self) -> str:
        cut = "" if self.reaches else ", cannot reach process 0"
        return (
            f"process {self.rank}: {self.part} of step {self.step} for {self.seconds:.0f} s,"
            f" at {self.line}{cut}"
        )


class Watchdog:
    """Watches one process of `count`. A part may take `hang_s`, or TYPICAL times the median step if
    that is longer; everything before the second step START_S, or `hang_s` if that is longer. With
    `hang_s` 0 it watches nothing."""

    def __init__(self, folder: pathlib.Path, rank: int, count: int, hang_s: float):
        self.folder, self.rank, self.count, self.hang_s = folder / FOLDER, rank, count, hang_s
        self._steps: collections.deque[float] = collections.deque(maxlen=50)
        self._now = ("start", 0, time.monotonic())
        self._over = threading.Event()
        if rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)  # of an earlier run
        if hang_s:
            threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    def enter(self, part: str, step: int) -> None:
        """A new part of a step begins; its name is what a verdict says."""
        before, _, began = self._now
        now = time.monotonic()
        if before == "step":
            self._steps.append(now - began)
        self._now = (part, step, now)

    def close(self) -> None:
        self._over.set()

    def limit(self) -> float:
        """Seconds that the part which runs now may take."""
        if len(self._steps) < 2:
            return max(START_S, self.hang_s)
        return max(self.hang_s, TYPICAL * statistics.median(self._steps))

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._over.wait(_LOOK_S):
            part, step, began = self._now
            now = time.monotonic()
            late = now - began
            if now - looked > _ASLEEP_S:  # this process was stopped itself, as by Ctrl-Z
                self._now, late = (part, step, now), 0.0
            looked = now
            if late > self.limit():
                self._end(Stand(self.rank, part, step, late, _line(), _reaches_coordinator()))

    def _end(self, own: Stand) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / f"process_{self.rank}.stacks.txt").open("w") as file:
                faulthandler.dump_traceback(file)
            replace_text(self._path(self.rank), json.dumps(dataclasses.asdict(own)))
            stands = self._gather()
        except OSError as error:
            stands = [own]
            print(f"optimus_jax: {self.folder}: {error}", file=sys.stderr)
        # every process ends, one speaks for all
        if own.rank == stands[0].rank:
            print("\n".join(verdict(stands, self.count)), file=sys.stderr)
        else:
            print(f"optimus_jax: hangs: {own}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_CODE)

    def _gather(self) -> list[Stand]:
        """What processes have written, once all have or patience is over, by rank."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            there = [n for n in range(self.count) if self._path(n).is_file()]
            if len(there) == self.count or time.monotonic() > deadline:
                return [Stand(**json.loads(self._path(n).read_text())) for n in there]
            time.sleep(_LOOK_S)

    def _path(self, rank: int) -> pathlib.Path:
        return self.folder / f"process_{rank}.json"


def verdict(stands: Sequence[Stand], count: int) -> list[str]:
    """What the stands of all processes that could write say, in words."""
    step = max(stand.step for stand in stands)
    lines = [f"optimus_jax: the run hangs at step {step}; ended with code {EXIT_CODE}"]
    silent = sorted(set(range(count)) - {stand.rank for stand in stands})
    cut = [stand.rank for stand in stands if not stand.reaches]
    if silent:
        lines.append(f"  no word from {_names(silent)}: stopped, dead or without the run's folder")
    if cut and len(cut) == count - 1 - len(silent) and count > 2:
        lines.append("  process 0 is cut off: none of the others can reach it")
    elif cut:
        lines.append(f"  {_names(cut)} cut off: cannot reach process 0")
    behind = [stand for stand in stands if stand.step < step or stand.part != "step"]
    if behind and len(behind) < len(stands):
        lines.append(f"  the others wait for {_names([stand.rank for stand in behind])}")
    lines += [f"  {stand}" for stand in (*behind, *(s for s in stands if s not in behind))][:_SHOWN]
    return lines


def _names(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
    return f"process {shown}" if len(ranks) == 1 else f"processes {shown}"


def _line() -> str:
    """The innermost line of Python that the main thread runs, of this project if there is one."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.extract_stack(frame) if frame else []
    own = [entry for entry in stack if f"{os.sep}optimus_jax{os.sep}" in entry.filename]
    for entry in (own or stack)[-1:]:
        return f"{pathlib.Path(entry.filename).name}:{entry.lineno} in {entry.name}"
    return "no line of Python"


def _reaches_coordinator() -> bool:
    address = os.environ.get(ADDRESS, "")
    if not address or os.environ.get("JAX_PROCESS_ID", "0") == "0":
        return True
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=3).close()
    except OSError:
        return False
    return True
