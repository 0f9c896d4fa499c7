"""Earliest-deadline packing of encoder tasks into every idle interval of the LLM's timeline."""

from __future__ import annotations

from typing import NamedTuple

from optimus_jax.schedule.dataflow import Dataflow
from optimus_jax.schedule.exchange import place_exchanges
from optimus_jax.schedule.simulate import (
    Durations,
    Item,
    Timing,
    idle_intervals,
    simulate,
)
from optimus_jax.schedule.task import Kind, Orders, Pipeline, Schedule, Task

Parts = list[tuple[int, tuple[int, ...]]]  # (microbatch, units) of each encoder task, one pass


def filled(llm: Orders, pipe: Pipeline, durations: Durations) -> Schedule:
    """Encoder tasks in all bubbles: warm-up, cool-down and the waits between them.

        0: EF0.0 F0 EF2 F1 B0 F2 B1 B2 EB2 ...
        1: EF0.1 EF1 F0 B0 F1 B1 F2 B2 EB0.1 ...

    Tries whole microbatches, microbatches spread in units over all devices, and whole ones with
    the first and the last spread (their encoder work is what no other packing can hide), and keeps
    the one whose Program is shortest; of equal ones the one with the fewest tasks.
    """
    whole = [(i, ()) for i in range(pipe.microbatches)]
    single: list[tuple[int, ...]] = [(u,) for u in range(pipe.units)] if pipe.units > 1 else [()]
    ends = {0, pipe.microbatches - 1}
    splits: list[Parts] = [
        whole,
        [(i, u) for i, all_ in whole for u in (single if i in ends else [all_])],
        [(i, u) for i, _ in whole for u in single],
    ]
    found = []
    for parts in splits:
        schedule = _Packing(llm, pipe, durations).pack(parts)
        end = place_exchanges(schedule, durations).timing(durations).end
        found.append((round(end, 9), len(parts), schedule))
    return min(found, key=lambda f: f[:2])[2]


class _Slot(NamedTuple):
    """A place for a task: before position `position` of a device's order, done at `end`, which is
    `late` seconds past what delays nothing."""

    late: float
    end: float
    device: int
    position: int


class _Packing:
    """Orders that grow by one encoder task at a time."""

    TRIED = 4  # how many late places are simulated to find the least harmful

    def __init__(self, llm: Orders, pipe: Pipeline, durations: Durations):
        self.pipe, self.durations = pipe, durations
        self.orders: list[list[Item]] = [list(order) for order in llm]
        everything = frozenset(range(pipe.microbatches))
        self.flow = Dataflow(pipe, llm, everything)
        self.owner: dict[tuple[int, tuple[int, ...]], int] = {}

    def pack(self, parts: Parts) -> Schedule:
        """Forwards in the order in which the LLM needs them, then backwards in the order in which
        their gradients arrive. A backward runs where its forward ran: the saved inputs are there."""
        rank: dict[tuple[Kind, int], int] = {}
        for n, task in enumerate(self.orders[0]):
            if isinstance(task, Task) and task.chunk == 0:
                rank[task.kind, task.microbatch] = n
        for kind, llm_kind in ((Kind.EF, Kind.F), (Kind.EB, Kind.B)):
            for i, units in sorted(parts, key=lambda part: (rank[llm_kind, part[0]], part[1])):
                self._place(Task(kind, i, units=units))
        orders = tuple(
            tuple(task for task in order if isinstance(task, Task)) for order in self.orders
        )
        return Schedule(self.pipe, orders)

    def _place(self, task: Task) -> None:
        timing = self._simulate()
        slots = sorted(self._slots(task, timing))
        if slots[0].late > 0 and len(slots) > 1:
            slots = sorted(
                slots[: self.TRIED], key=lambda slot: (round(self._end_with(task, slot), 9), slot)
            )
        self._insert(task, slots[0])
        self.owner[task.microbatch, task.units] = slots[0].device

    def _slots(self, task: Task, timing: Timing) -> list[_Slot]:
        """Every place for `task`, whether or not something gets late."""
        release, deadline = 0.0, float("inf")
        devices = list(range(self.pipe.stages))
        if task.kind == Kind.EF:
            deadline = self._llm_time(Kind.F, task.microbatch, timing)[0]
        else:
            release = self._llm_time(Kind.B, task.microbatch, timing)[1]
            devices = [self.owner[task.microbatch, task.units]]
        slots = []
        for device in devices:
            length = self.durations.of(task, device, self.pipe)
            waits = idle_intervals(timing.intervals[device], timing.end)
            for position, begin, until in waits:
                start = max(begin, release)
                # a place past the deadline, or before the release, would block its device's tasks
                if start > deadline or (until < release and position < len(waits) - 1):
                    continue
                late = max(0.0, start + length - min(until, deadline))
                slots.append(_Slot(round(late, 9), start + length, device, position))
        return slots

    def _llm_time(self, kind: Kind, microbatch: int, timing: Timing) -> tuple[float, float]:
        return timing.intervals[0][self.orders[0].index(Task(kind, microbatch))]

    def _end_with(self, task: Task, slot: _Slot) -> float:
        self._insert(task, slot)
        end = self._simulate().end
        self.flow.remove(slot.device, task)
        del self.orders[slot.device][slot.position]
        return end

    def _insert(self, task: Task, slot: _Slot) -> None:
        self.flow.add(slot.device, task)
        self.orders[slot.device].insert(slot.position, task)

    def _simulate(self) -> Timing:
        return simulate(self.orders, self.flow, self.durations)
