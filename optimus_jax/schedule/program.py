"""Program: what the executor runs, as int32 tables over a fixed alphabet of exchange patterns."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import NamedTuple

import numpy as np

from optimus_jax.schedule.columns import ENCODER_KINDS as ENCODER_KINDS
from optimus_jax.schedule.columns import KINDS as KINDS
from optimus_jax.schedule.columns import NONE as NONE
from optimus_jax.schedule.columns import Columns as Columns
from optimus_jax.schedule.columns import columns_of
from optimus_jax.schedule.columns import task_of as task_of
from optimus_jax.schedule.dataflow import LLM as LLM
from optimus_jax.schedule.dataflow import Payload as Payload
from optimus_jax.schedule.durations import Durations
from optimus_jax.schedule.patterns import Pattern as Pattern
from optimus_jax.schedule.patterns import alphabet as alphabet
from optimus_jax.schedule.patterns import payloads as payloads
from optimus_jax.schedule.task import Pipeline, ScheduleError, Task


@dataclasses.dataclass(frozen=True)
class EncoderSlots:
    """Buffers of a device for one encoder. `feature`: features of one unit and their gradients.
    `hidden`: what goes from one of its stages to the next, and gradients. `saved`: layer inputs of
    one unit."""

    feature: int = 0
    hidden: int = 0
    saved: int = 0

    def covering(self, other: EncoderSlots) -> EncoderSlots:
        """The least slots that hold both."""
        return EncoderSlots(*map(max, dataclasses.astuple(self), dataclasses.astuple(other)))


@dataclasses.dataclass(frozen=True)
class Slots:
    """How many buffers of each kind a device has: the activation memory of a Program.

    `wire`: LLM activations and gradients between tasks. `saved`: layer inputs of one LLM chunk and
    microbatch. `encoders`: those of each encoder.
    """

    wire: int = 0
    saved: int = 0
    encoders: tuple[EncoderSlots, ...] = ()

    def covering(self, other: Slots) -> Slots:
        """The least slots that hold both."""
        pairs = itertools.zip_longest(self.encoders, other.encoders, fillvalue=EncoderSlots())
        return Slots(
            max(self.wire, other.wire),
            max(self.saved, other.saved),
            tuple(one.covering(another) for one, another in pairs),
        )

    def of(self, pool: str, encoder: int = 0) -> int:
        """Slots of one pool: wire or saved; feature, hidden or encoder (saved state) of one
        encoder."""
        if pool in ("wire", "saved"):
            return self.wire if pool == "wire" else self.saved
        if encoder >= len(self.encoders):
            return 0
        slots = self.encoders[encoder]
        return {"feature": slots.feature, "hidden": slots.hidden, "encoder": slots.saved}[pool]


class Meeting(NamedTuple):
    """An exchange between two devices: at which tick, of which payload class, and when."""

    tick: int
    pair: tuple[int, int]
    payload: Payload
    start: float
    end: float


class Trace(NamedTuple):
    """What a Program does when: by device, tasks with start and end; and the meetings."""

    tasks: list[list[tuple[Task, float, float]]]
    meetings: list[Meeting]
    end: float


class Shape(NamedTuple):
    """What Programs must have in common to share a compiled step."""

    ticks: int
    slots: Slots
    prologue: int
    epilogue: int


def _no_rows() -> np.ndarray:
    return np.zeros((0, 0, 0), np.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """int32 `table` [ticks, devices, columns] and `pattern` [ticks], the index of each tick's
    exchange in `alphabet(pipeline)`. At a tick every device runs its row's task, then the exchange
    moves data. `slots` are the buffers that the table's slot numbers refer to. `prologue` and
    `epilogue` int32 [rows, devices, columns]: encoder tasks without an exchange, before the first
    tick beside the gathering of weights and after the last one beside the scattering of
    gradients."""

    pipeline: Pipeline
    slots: Slots
    table: np.ndarray
    pattern: np.ndarray
    prologue: np.ndarray = dataclasses.field(default_factory=_no_rows)
    epilogue: np.ndarray = dataclasses.field(default_factory=_no_rows)

    def __post_init__(self) -> None:
        for name in ("prologue", "epilogue"):
            if not getattr(self, name).size:
                object.__setattr__(self, name, np.zeros((0, *self.table.shape[1:]), np.int32))

    @functools.cached_property
    def columns(self) -> Columns:
        return columns_of(self.pipeline)

    @property
    def ticks(self) -> int:
        return len(self.table)

    @property
    def shape(self) -> Shape:
        return Shape(self.ticks, self.slots, len(self.prologue), len(self.epilogue))

    @property
    def used_ticks(self) -> int:
        """Ticks up to the last one in which something happens; the rest is padding."""
        at = self.columns
        tasks = (self.table[:, :, at[name]] != 0 for name in ("kind", "e_kind"))
        busy = np.logical_or(*tasks).any(axis=1) | (self.pattern != 0)
        return int(np.flatnonzero(busy)[-1]) + 1 if busy.any() else 0

    def task(self, tick: int, device: int) -> Task | None:
        """The task of one row, read back from the table; None if idle."""
        return self._task("tick", self.table, tick, device)

    def task_beside(self, part: str, row: int, device: int) -> Task | None:
        """The task of one row of `part`, "prologue" or "epilogue"; None if idle."""
        return self._task(f"{part} row", getattr(self, part), row, device)

    def _task(self, name: str, table: np.ndarray, row: int, device: int) -> Task | None:
        try:
            return task_of(table[row, device], self.pipeline, device)
        except ScheduleError as error:
            raise ScheduleError(f"{name} {row} device {device}: {error}") from None

    def padded(
        self, ticks: int, slots: Slots, prologue: int | None = None, epilogue: int | None = None
    ) -> Program:
        """The same program in a larger shape, so that it shares a compilation with others.
        `padded(*shape)` takes that of another; rows that are not given stay as many as they are.

        Raises ScheduleError if it does not fit.
        """
        own = self.shape
        new = Shape(
            ticks,
            slots,
            own.prologue if prologue is None else prologue,
            own.epilogue if epilogue is None else epilogue,
        )
        fewer = any(a < b for a, b in zip(new[::2], own[::2], strict=True)) or (
            new.epilogue < own.epilogue
        )
        if fewer or slots.covering(self.slots) != slots:
            raise ScheduleError(
                f"a program of {own.ticks} ticks, {own.prologue} and {own.epilogue} rows around"
                f" them and {own.slots} does not fit the shape of {new.ticks} ticks,"
                f" {new.prologue} and {new.epilogue} rows and {slots}"
            )
        none = np.zeros(ticks - self.ticks, np.int32)
        return Program(
            self.pipeline,
            slots,
            self._longer(self.table, ticks),
            np.concatenate([self.pattern, none]).astype(np.int32),
            self._longer(self.prologue, new.prologue),
            self._longer(self.epilogue, new.epilogue),
        )

    def _longer(self, table: np.ndarray, rows: int) -> np.ndarray:
        idle = self.columns.idle_row()
        more = np.broadcast_to(idle, (rows - len(table), self.pipeline.stages, len(idle)))
        return np.concatenate([table, more]).astype(np.int32)

    def time(self, durations: Durations) -> list[list[tuple[Task, float, float]]]:
        """By device, its tasks with start and end under the timing rule of a Program: a tick starts
        on a device when its last task has ended, and that of every device with which it exchanged;
        an exchange takes its transfer time. The first tick starts after the gathering of weights
        and the prologue, which run one after another, or at once if `durations.overlap`; the
        scattering of gradients and the epilogue follow the last tick likewise."""
        return self.trace(durations).tasks

    def trace(self, durations: Durations) -> Trace:
        """As `time`, with the exchanges and the end of the whole."""
        pipe, beside = self.pipeline, durations.overlap
        clock = [0.0 if beside else durations.gather] * pipe.stages
        trace: list[list[tuple[Task, float, float]]] = [[] for _ in clock]
        meetings: list[Meeting] = []
        patterns = alphabet(pipe)

        def run(device: int, task: Task | None) -> None:
            if task is not None:
                end = clock[device] + durations.of(task, device, pipe)
                trace[device].append((task, clock[device], end))
                clock[device] = end

        for row in range(len(self.prologue)):
            for device in range(pipe.stages):
                run(device, self.task_beside("prologue", row, device))
        if beside:
            clock = [max(durations.gather, time) for time in clock]
        for tick in range(self.ticks):
            for device in range(pipe.stages):
                run(device, self.task(tick, device))
            pattern = patterns[self.pattern[tick]]
            for a, b in sorted(pattern.links):
                start = max(clock[a], clock[b])
                end = start + durations.travel(pattern.payload)
                clock[a] = clock[b] = end
                meetings.append(Meeting(tick, (a, b), pattern.payload, start, end))
        done = [time + durations.scatter for time in clock] if durations.scatter else clock
        for row in range(len(self.epilogue)):
            for device in range(pipe.stages):
                run(device, self.task_beside("epilogue", row, device))
        if durations.scatter and not beside:
            done = [time + durations.scatter for time in clock]
        return Trace(trace, meetings, max(map(max, done, clock)))

    def end(self, durations: Durations) -> float:
        """Seconds of the whole Program without `durations.epilogue`."""
        return self.trace(durations).end


def fit_together(programs: list[Program]) -> list[Program]:
    """The programs of one pipeline in one shape: they share a compiled step."""
    slots = functools.reduce(Slots.covering, (program.slots for program in programs), Slots())
    shapes = [program.shape for program in programs]
    ticks = max((shape.ticks for shape in shapes), default=0)
    prologue = max((shape.prologue for shape in shapes), default=0)
    epilogue = max((shape.epilogue for shape in shapes), default=0)
    return [program.padded(ticks, slots, prologue, epilogue) for program in programs]
