"""Encoder tasks moved into LLM tasks, where they run beside its tensor-parallel collectives."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from optimus_jax.schedule.complete import check_cap
from optimus_jax.schedule.dataflow import Dataflow
from optimus_jax.schedule.simulate import Durations, simulate
from optimus_jax.schedule.task import Kind, Pipeline, Schedule, ScheduleError, Task

_EPSILON = 1e-9
_EFFORT = 1_000_000  # tasks timed in search of places


def fuse(schedule: Schedule, durations: Durations) -> Schedule:
    """Moves encoder tasks into the nearest LLM task of their device and direction, wherever
    dependencies and the cap allow it and the event-driven time does not grow.

    An encoder task of more layers than the LLM task has is cut: the layers next to it in time go
    in, the others stay. One of several units is taken apart into units first, which delays nothing.
    """
    return _Fusing(schedule, durations).run()


class _Fusing:
    def __init__(self, schedule: Schedule, durations: Durations):
        self.pipe, self.durations = schedule.pipeline, durations
        self.encoded = schedule.encoded
        self.orders = [
            [part for task in order for part in _apart(task, self.pipe)]
            for order in schedule.orders
        ]
        orders = tuple(map(tuple, self.orders))
        self.flow = Dataflow(self.pipe, orders, self.encoded)
        self.end = simulate(self.orders, self.flow, durations).end
        self.effort = _EFFORT

    def run(self) -> Schedule:
        for device in range(self.pipe.stages):
            k = 0
            while k < len(self.orders[device]) and self.effort > 0:
                # one that goes in leaves its place to the next, or to the rest of its layers
                task = self.orders[device][k]
                if not (task.kind.is_encoder and self._move(device, k)):
                    k += 1
        return Schedule(self.pipe, tuple(map(tuple, self.orders)))

    def _move(self, device: int, k: int) -> bool:
        """Moves the encoder task at a position, or a part of it, to the best place."""
        found: tuple[float, list[Task]] | None = None
        for order in self._ways(device, k):
            end = self._timed(device, order)
            if end is not None and (found is None or end < found[0] - _EPSILON):
                found = end, order
        if found is None:
            return False
        self._replace(device, found[1])
        self.end = found[0]
        return True

    def _ways(self, device: int, k: int) -> Iterator[list[Task]]:
        """The orders of a device with the task in the nearest LLM task before or behind it."""
        order, pipe = self.orders[device], self.pipe
        task = order[k]
        if len(pipe.units_of(task)) > 1:
            return
        begin, end = pipe.layers_of(task, device)
        for places in (range(k - 1, -1, -1), range(k + 1, len(order))):
            at = next((n for n in places if order[n].kind.inside == task.kind), None)
            if at is None or order[at].inside:
                continue
            room = min(pipe.llm_layers[order[at].chunk * pipe.stages + device], end - begin)
            # the first layers that it runs go into an earlier task, the last ones into a later one
            if (at < k) == (task.kind == Kind.EF):
                inner, rest = (begin, begin + room), (begin + room, end)
            else:
                inner, rest = (end - room, end), (begin, end - room)
            moved = list(order)
            part = pipe.short(dataclasses.replace(task, layers=inner), device)
            moved[at] = dataclasses.replace(order[at], inside=part)
            left = dataclasses.replace(task, layers=rest)
            moved[k : k + 1] = [left] if rest[0] < rest[1] else []
            yield moved

    def _timed(self, device: int, order: list[Task]) -> float | None:
        """The time of the step with another order on a device; None if that is longer, if tasks
        then wait for one another, or if it breaks the cap."""
        before = self.orders[device]
        self.effort -= sum(map(len, self.orders))
        self._replace(device, order)
        try:
            check_cap(device, tuple(order), self.pipe)
            self.flow.check()
            end = simulate(self.orders, self.flow, self.durations).end
        except ScheduleError:
            end = float("inf")
        self._replace(device, before)
        return end if end <= self.end + _EPSILON else None

    def _replace(self, device: int, order: list[Task]) -> None:
        old = self.orders[device]
        for task in set(old) - set(order):
            self.flow.remove(device, task)
        for task in set(order) - set(old):
            self.flow.add(device, task)
        self.orders[device] = order


def _apart(task: Task, pipe: Pipeline) -> list[Task]:
    """A task of several units as one task for each."""
    if not task.kind.is_encoder:
        return [task]
    units = pipe.units_of(task)
    if len(units) == 1:
        return [task]
    return [dataclasses.replace(task, units=(u,)) for u in units]
