"""XLA's own prediction of how long the loops of a program take on the GPUs.

It comes from the latency-hiding scheduler's dump (xla_dump_latency_hiding_schedule), a protobuf in
text form with start and end of every instruction of each computation that the scheduler saw: those
with asynchronous work. Each is timed by itself: a loop or a conditional takes no time in the
computation around it. The fields say cycles; there is one of them in a microsecond.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

Message = dict[str, list[Any]]  # a field's values: messages, or scalars as text


@dataclasses.dataclass(frozen=True)
class Timed:
    """A computation that was timed: microseconds of one pass, and those of them in which no kernel
    runs."""

    name: str
    us: float
    idle_us: float


def read(folder: pathlib.Path) -> list[Timed]:
    """The timed computations of the one module whose dump lies in `folder`: none if there is
    nothing asynchronous in it, since the scheduler then has nothing to do."""
    dumps = sorted(folder.glob("*.schedule.txt"))
    return [timed for path in dumps for timed in timed_computations(path.read_text())]


def timed_computations(dump: str) -> list[Timed]:
    """The computations of a dump, in its order."""
    message = parse(dump)
    names: dict[str, str] = {}
    for module in message["hlo_module"]:
        for computation in module.get("computations", []):
            names[_text(computation, "id")] = _text(computation, "name")
    return [
        _timed(names[_text(schedule, "computation_id")], schedule)
        for schedule in message.get("computation_schedules", [])
    ]


def _timed(name: str, schedule: Message) -> Timed:
    scale = float(_text(schedule, "cycles_per_microsecond", "1"))
    spans = []
    for row in schedule.get("instructions", []):
        begin = float(_text(row, "start_timestamp_cycles", "0")) / scale
        end = float(_text(row, "end_timestamp_cycles", "0")) / scale
        spans.append((begin, end))
    return Timed(name, max((end for _, end in spans), default=0.0), _idle(spans))


def _idle(spans: list[tuple[float, float]]) -> float:
    """Time from zero to the last end that no span covers."""
    idle = at = 0.0
    for begin, end in sorted(spans):
        idle += max(0.0, begin - at)
        at = max(at, end)
    return idle


def parse(text: str) -> Message:
    """A text protobuf as XLA prints it, one field or bracket on each line."""
    message: Message = {}
    _fill(message, iter(text.splitlines()))
    return message


def _fill(message: Message, lines: Iterator[str]) -> None:
    for line in lines:
        line = line.strip()
        if line == "}":
            return
        if line.endswith("{"):
            inner: Message = {}
            message.setdefault(line[:-1].rstrip(": "), []).append(inner)
            _fill(inner, lines)
        elif line:
            field, _, value = line.partition(": ")
            message.setdefault(field, []).append(value.strip('"'))


def _text(message: Message, field: str, default: str = "") -> str:
    return message.get(field, [default])[0]
