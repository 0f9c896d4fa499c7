"""From a placement to a Program: exchanges into ticks, then (slots.py) values into slots."""

from __future__ import annotations

import dataclasses
import functools

from optimus_jax.schedule.dataflow import Payload
from optimus_jax.schedule.exchange import Placement, place_exchanges
from optimus_jax.schedule.program import Program, Slots, alphabet
from optimus_jax.schedule.simulate import Durations
from optimus_jax.schedule.slots import BUCKET, Layout, Tick, assign_slots, pattern_of
from optimus_jax.schedule.task import Pipeline, Schedule, Task

Links = frozenset[tuple[int, int]]


def lower(
    schedule: Schedule, durations: Durations, slots: Slots | None = None, bucket: int = BUCKET
) -> Program:
    """The Program of a schedule. `slots` are the plan's caps; without them it gets what it needs.

    Raises ScheduleError, naming tick and device, if the caps are too small.
    """
    layout = to_ticks(place_exchanges(schedule, durations), durations)
    return assign_slots(schedule, layout, slots, bucket)


def to_ticks(placement: Placement, durations: Durations) -> Layout:
    """Numbers tasks and exchanges by ticks in order of time, as early as each device allows. The
    exchanges of one tick fit one pattern of the alphabet; what does not fit takes a later tick.
    Encoder tasks beside the collectives over replicas (`Beside`) take rows of their own."""
    pipe = placement.schedule.pipeline
    timing = placement.timing(durations)
    ahead, behind = timing.beside
    task_at, exchange_at = [-1] * pipe.stages, [-1] * pipe.stages
    position = [0] * pipe.stages
    layout = Layout([[] for _ in ahead], [], [[] for _ in ahead])
    ticks = layout.ticks

    def tick(number: int) -> Tick:
        while len(ticks) <= number:
            ticks.append(Tick({}))
        return ticks[number]

    seen: set[int] = set()
    for device, item, _, _ in timing.log:
        here, position[device] = position[device], position[device] + 1
        if isinstance(item, Task):
            if here < ahead[device] or here >= behind[device]:
                rows = layout.prologue if here < ahead[device] else layout.epilogue
                rows[device].append(item)
                continue
            task_at[device] = max(task_at[device], exchange_at[device]) + 1
            tick(task_at[device]).tasks[device] = item
            continue
        if id(item) in seen:
            continue
        seen.add(id(item))
        number = max(max(task_at[d], exchange_at[d] + 1) for d in item.pair)
        while not _fits(tick(number), item.payload, item.pair, pipe):
            number += 1
        tick(number).payload = item.payload
        tick(number).links[item.pair] = item.values
        for d in item.pair:
            exchange_at[d] = number
    return dataclasses.replace(layout, ticks=_whole_patterns(layout, pipe, durations, timing.end))


@functools.lru_cache
def _sets(pipe: Pipeline, payload: Payload) -> tuple[Links, ...]:
    """The links of each pattern of a class."""
    return tuple(p.links for p in alphabet(pipe) if p.payload == payload)


def _fits(tick: Tick, payload: Payload, pair: tuple[int, int], pipe: Pipeline) -> bool:
    if not tick.links:
        return True
    links = {*tick.links, pair}
    return tick.payload == payload and any(links <= one for one in _sets(pipe, payload))


def _whole_patterns(layout: Layout, pipe: Pipeline, durations: Durations, end: float) -> list[Tick]:
    """Splits a tick that uses only part of a pattern into single links, each in a tick of its own,
    unless the unused links make nobody wait: their devices would meet for nothing."""

    def is_whole(tick: Tick) -> bool:
        return not tick.links or frozenset(tick.links) in _sets(pipe, tick.payload)

    def split(kept: set[int]) -> list[Tick]:
        out = []
        for k, tick in enumerate(layout.ticks):
            if is_whole(tick) or k in kept:
                out.append(tick)
                continue
            for n, (pair, values) in enumerate(tick.links.items()):
                out.append(Tick(tick.tasks if n == 0 else {}, tick.payload, {pair: values}))
        return out

    def time(kept: set[int]) -> float:
        return _time(dataclasses.replace(layout, ticks=split(kept)), pipe, durations)

    kept: set[int] = set()
    for k, tick in enumerate(layout.ticks):
        if not is_whole(tick) and time(kept | {k}) <= end + 1e-9:
            kept.add(k)
    return split(kept)


def _time(layout: Layout, pipe: Pipeline, durations: Durations) -> float:
    """As Program.end, before slots are assigned."""
    gather, scatter, overlap = durations.gather, durations.scatter, durations.overlap
    patterns = alphabet(pipe)

    def seconds(tasks: list[Task], device: int) -> float:
        return sum(durations.of(task, device, pipe) for task in tasks)

    clock = [seconds(tasks, d) for d, tasks in enumerate(layout.prologue)]
    clock = [max(time, gather) if overlap else time + gather for time in clock]
    for tick in layout.ticks:
        for device, task in tick.tasks.items():
            clock[device] += durations.of(task, device, pipe)
        if tick.links:
            for a, b in patterns[pattern_of(tick, pipe)].links:
                clock[a] = clock[b] = max(clock[a], clock[b]) + durations.travel(tick.payload)
    after = [seconds(tasks, d) for d, tasks in enumerate(layout.epilogue)]
    both = [max(t, scatter) if overlap else t + scatter for t in after]
    return max(time + more for time, more in zip(clock, both, strict=True))
