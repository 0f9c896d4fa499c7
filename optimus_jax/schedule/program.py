"""Program: what the executor runs, as int32 tables over a fixed alphabet of exchange patterns."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from optimus_jax.schedule.simulate import Durations
from optimus_jax.schedule.task import Kind, Pipeline, ScheduleError, Task

KINDS = {Kind.F: 1, Kind.B: 2, Kind.EF: 3, Kind.EB: 4}  # 0 is idle
NONE = -1  # no slot


@dataclasses.dataclass(frozen=True)
class Slots:
    """How many buffers of each kind a device has: the activation memory of a Program.

    `wire`: LLM activations and gradients between tasks. `feature`: features of one unit and their
    gradients. `saved`: layer inputs of one LLM chunk and microbatch. `encoder`: layer inputs of one
    encoder unit.
    """

    wire: int = 0
    feature: int = 0
    saved: int = 0
    encoder: int = 0

    def covering(self, other: Slots) -> Slots:
        """The least slots that hold both."""
        return Slots(*map(max, dataclasses.astuple(self), dataclasses.astuple(other)))


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A set of links that one exchange moves data over, both ways, for one payload class."""

    features: bool
    links: frozenset[tuple[int, int]]


@functools.lru_cache
def alphabet(pipe: Pipeline) -> tuple[Pattern, ...]:
    """All patterns of a pipeline: none; even links; odd links; each link; the wrap link if there
    are several chunks; encoder pipeline j with the first stage, for each j. The grid alone fixes
    it, so a schedule never changes the compiled step."""
    links = [(s, s + 1) for s in range(pipe.stages - 1)]
    sets = [links[0::2], links[1::2], *([link] for link in links)]
    if pipe.chunks > 1 and pipe.stages > 1:
        sets.append([(0, pipe.stages - 1)])
    llm = dict.fromkeys(Pattern(False, frozenset(s)) for s in sets if s)
    features = [Pattern(True, frozenset([(0, j)])) for j in range(1, pipe.stages)]
    return (Pattern(False, frozenset()), *llm, *features)


class Columns:
    """Where each field stands in a row of the table.

    One entry each: `kind`, `microbatch`, `chunk`; of an LLM task `layers` (their count), `first`
    and `last` (whether it is the first or last virtual stage), `saved` slot, `read` and `write`
    wire slots; of an encoder task `count` of units and layers `begin` to `end`; `send` and
    `receive` wire slots of the exchange after the task. One entry for each unit: `feature` slot,
    `encoder` slot, `unit`, and the slots `feature_send` and `feature_receive` of the exchange.
    """

    SCALARS = (
        *("kind", "microbatch", "chunk", "layers", "first", "last", "saved", "read", "write"),
        *("count", "begin", "end", "send", "receive"),
    )
    VECTORS = ("feature", "encoder", "unit", "feature_send", "feature_receive")
    SLOTS = ("saved", "read", "write", "send", "receive", "feature", "encoder")

    def __init__(self, units: int):
        self.at: dict[str, int | slice] = {name: k for k, name in enumerate(self.SCALARS)}
        start = len(self.SCALARS)
        for k, name in enumerate(self.VECTORS):
            self.at[name] = slice(start + k * units, start + (k + 1) * units)
        self.width = start + len(self.VECTORS) * units

    def __getitem__(self, name: str) -> int | slice:
        return self.at[name]

    def idle_row(self) -> np.ndarray:
        row = np.zeros(self.width, np.int32)
        for name in (*self.SLOTS, "feature_send", "feature_receive"):
            row[self.at[name]] = NONE
        return row


class Meeting(NamedTuple):
    """An exchange between two devices: at which tick, of which payload class, and when."""

    tick: int
    pair: tuple[int, int]
    features: bool
    start: float
    end: float


class Trace(NamedTuple):
    """What a Program does when: by device, tasks with start and end; and the meetings."""

    tasks: list[list[tuple[Task, float, float]]]
    meetings: list[Meeting]


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """int32 `table` [ticks, devices, columns] and `pattern` [ticks], the index of each tick's
    exchange in `alphabet(pipeline)`. At a tick every device runs its row's task, then the exchange
    moves data. `slots` are the buffers that the table's slot numbers refer to."""

    pipeline: Pipeline
    slots: Slots
    table: np.ndarray
    pattern: np.ndarray

    @functools.cached_property
    def columns(self) -> Columns:
        return Columns(self.pipeline.units)

    @property
    def ticks(self) -> int:
        return len(self.table)

    @property
    def used_ticks(self) -> int:
        """Ticks up to the last one in which something happens; the rest is padding."""
        busy = (self.table[:, :, self.columns["kind"]] != 0).any(axis=1) | (self.pattern != 0)
        return int(np.flatnonzero(busy)[-1]) + 1 if busy.any() else 0

    def task(self, tick: int, device: int) -> Task | None:
        """The task of one row, read back from the table; None if idle."""
        try:
            return task_of(self.table[tick, device], self.pipeline)
        except ScheduleError as error:
            raise ScheduleError(f"tick {tick} device {device}: {error}") from None

    def padded(self, ticks: int, slots: Slots) -> Program:
        """The same program in a larger shape, so that it shares a compilation with others.

        Raises ScheduleError if it does not fit.
        """
        if ticks < self.ticks or slots.covering(self.slots) != slots:
            raise ScheduleError(
                f"a program of {self.ticks} ticks and {self.slots} does not fit the shape of"
                f" {ticks} ticks and {slots}"
            )
        idle = self.columns.idle_row()
        more = np.broadcast_to(idle, (ticks - self.ticks, self.pipeline.stages, len(idle)))
        return Program(
            self.pipeline,
            slots,
            np.concatenate([self.table, more]).astype(np.int32),
            np.concatenate([self.pattern, np.zeros(ticks - self.ticks, np.int32)]),
        )

    def time(self, durations: Durations) -> list[list[tuple[Task, float, float]]]:
        """By device, its tasks with start and end under the timing rule of a Program: a tick starts
        on a device when its last task has ended, and that of every device with which it exchanged;
        an exchange takes its transfer time."""
        return self.trace(durations).tasks

    def trace(self, durations: Durations) -> Trace:
        """As `time`, with the exchanges."""
        clock = [0.0] * self.pipeline.stages
        trace = Trace([[] for _ in clock], [])
        patterns = alphabet(self.pipeline)
        for tick in range(self.ticks):
            for device in range(self.pipeline.stages):
                task = self.task(tick, device)
                if task is not None:
                    end = clock[device] + durations.of(task, device, self.pipeline)
                    trace.tasks[device].append((task, clock[device], end))
                    clock[device] = end
            pattern = patterns[self.pattern[tick]]
            for a, b in sorted(pattern.links):
                start = max(clock[a], clock[b])
                end = start + durations.travel(pattern.features)
                clock[a] = clock[b] = end
                trace.meetings.append(Meeting(tick, (a, b), pattern.features, start, end))
        return trace

    def end(self, durations: Durations) -> float:
        """Seconds of the whole Program without the epilogue."""
        return max(end for row in self.time(durations) for *_, end in row[-1:])


def fit_together(programs: list[Program]) -> list[Program]:
    """The programs of one pipeline in one shape: they share a compiled step."""
    slots, ticks = Slots(), 0
    for program in programs:
        slots, ticks = slots.covering(program.slots), max(ticks, program.ticks)
    return [program.padded(ticks, slots) for program in programs]


def task_of(row: np.ndarray, pipe: Pipeline) -> Task | None:
    """The task that a row of a table names; None if idle. ScheduleError for an unknown kind."""
    at = Columns(pipe.units)
    if not row[at["kind"]]:
        return None
    kind = next((kind for kind, number in KINDS.items() if number == row[at["kind"]]), None)
    if kind is None:
        raise ScheduleError(f"no task has kind {row[at['kind']]}")
    microbatch = int(row[at["microbatch"]])
    if not kind.is_encoder:
        return Task(kind, microbatch, int(row[at["chunk"]]))
    units = tuple(int(u) for u in row[at["unit"]][: row[at["count"]]])
    layers = int(row[at["begin"]]), int(row[at["end"]])
    return pipe.short(Task(kind, microbatch, units=units, layers=layers))
