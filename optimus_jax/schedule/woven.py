"""Encoder layers spread evenly over the LLM's tasks, where they run beside its collectives.

Packing looks for idle intervals. Once those are full, the rest of the encoder's work lies in the
steady state, and it is best put inside LLM tasks: the collectives of every layer hide some of it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from optimus_jax.schedule.complete import check_cap
from optimus_jax.schedule.simulate import Durations, event_driven
from optimus_jax.schedule.task import Kind, Orders, Pipeline, Schedule, ScheduleError, Task

_EPSILON = 1e-9


def woven(llm: Orders, pipe: Pipeline, durations: Durations) -> Schedule | None:
    """The shortest schedule of those that run the encoder's forward of microbatch i + n inside the
    LLM's forwards of microbatch i, and the backward of microbatch i inside the LLM's backwards of
    microbatch i + m; the first n forwards stand before the LLM's tasks, the last m backwards after.

        0: EF0.0 F0|EF1.0[0:2) EF1.0[2:4) B0 F1 B1|EB0.0[2:4) EB0.0[0:2) EB1.0
        1: EF0.1 F0|EF1.1[0:2) EF1.1[2:4) B0 F1 B1|EB0.1[2:4) EB0.1[0:2) EB1.1

    Every pipeline runs its units of every microbatch. Layers for which no LLM task has room stand
    behind the last that had some. n and m are tried from small to large, first the same, then each
    by itself; None if no choice obeys the cap and waits for nothing in vain.
    """
    found: dict[tuple[int, int], tuple[float, Schedule]] = {}

    def time(ahead: int, behind: int) -> float:
        if (ahead, behind) not in found:
            schedule = Schedule(pipe, tuple(_orders(llm, pipe, ahead, behind)))
            try:
                for device, order in enumerate(schedule.orders):
                    check_cap(device, order, pipe)
                end = event_driven(schedule, durations).end
            except ScheduleError:
                end = float("inf")
            found[ahead, behind] = end, schedule
        return found[ahead, behind][0]

    some = range(1, pipe.microbatches)
    for n in some:
        time(n, n)
    for _ in range(2):
        ahead, behind = min(found, key=lambda key: found[key][0], default=(0, 0))
        for n in some:
            time(n, behind), time(ahead, n)
    end, schedule = min(found.values(), key=lambda one: one[0], default=(float("inf"), None))
    return schedule if end < float("inf") else None


def _orders(llm: Orders, pipe: Pipeline, ahead: int, behind: int) -> Iterator[tuple[Task, ...]]:
    """The order of each device."""
    for device, order in enumerate(llm):
        forwards = _wanted(device, pipe, Kind.EF, range(pipe.microbatches))
        backwards = _wanted(device, pipe, Kind.EB, range(pipe.microbatches))
        before = [task for i in range(ahead) for task in forwards.get(i, [])]
        after = [
            task
            for i in range(pipe.microbatches - behind, pipe.microbatches)
            for task in backwards.get(i, [])
        ]
        passes = {kind: [t for t in order if t.kind == kind] for kind in (Kind.F, Kind.B)}
        chunks = max(1, len(passes[Kind.F]) // pipe.microbatches)
        # by LLM task, what may go inside; a microbatch has as many tasks as the device has chunks
        inside: dict[Task, list[Task]] = {}
        for n, task in enumerate(passes[Kind.F]):
            if n % chunks == 0:
                inside[task] = list(forwards.get(n // chunks + ahead, []))
        for n, task in enumerate(passes[Kind.B]):
            if n % chunks == 0 and n // chunks >= behind:
                inside[task] = list(backwards.get(n // chunks - behind, []))
        yield (*before, *_woven(device, order, pipe, inside, chunks), *after)


def _wanted(device: int, pipe: Pipeline, kind: Kind, microbatches: range) -> dict[int, list[Task]]:
    """By microbatch, the encoder tasks of a device, each of one unit."""
    found: dict[int, list[Task]] = {}
    for i, (k, sizes) in itertools.product(microbatches, enumerate(pipe.encoders)):
        first, end = pipe.stage_layers(k, device)
        count, mine = pipe.pipelines(k), pipe.pipeline_of(k, device)
        if first < end:
            units = range(mine, sizes.units, count)
            tasks = [Task(kind, i, units=(u,), encoder=k) for u in units]
            found.setdefault(i, []).extend(tasks)
    return found


def _woven(
    device: int,
    order: tuple[Task, ...],
    pipe: Pipeline,
    inside: dict[Task, list[Task]],
    chunks: int,
) -> Iterator[Task]:
    """The LLM's order with encoder tasks inside; what is left of a microbatch's stands behind the
    last LLM task that may hold it."""
    waiting: dict[Kind, list[Task]] = {Kind.F: [], Kind.B: []}
    left = {Kind.F: 0, Kind.B: 0}
    for task in order:
        kind = task.kind
        if task in inside:
            yield from waiting[kind]
            waiting[kind], left[kind] = inside[task], chunks
        part = None
        if waiting[kind]:
            room = pipe.llm_layers[task.chunk * pipe.stages + device]
            part, waiting[kind] = _cut(waiting[kind], room, device, pipe)
        yield dataclasses.replace(task, inside=part)
        left[kind] -= 1
        if left[kind] == 0:
            yield from waiting[kind]
            waiting[kind] = []


def _cut(
    tasks: list[Task], room: int, device: int, pipe: Pipeline
) -> tuple[Task | None, list[Task]]:
    """The first layers to run of the first task, as many as there is room for, and what is left."""
    task, *rest = tasks
    begin, end = pipe.layers_of(task, device)
    room = min(room, end - begin)
    if not room:
        return None, tasks
    if task.kind == Kind.EF:
        now, later = (begin, begin + room), (begin + room, end)
    else:
        now, later = (end - room, end), (begin, end - room)
    if later[0] < later[1]:
        rest = [pipe.short(dataclasses.replace(task, layers=later), device), *rest]
    return pipe.short(dataclasses.replace(task, layers=now), device), rest
