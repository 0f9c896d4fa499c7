"""Random valid schedules: any legal order of the LLM's tasks, any split of the encoders'."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection

from optimus_jax.schedule.dataflow import Dataflow
from optimus_jax.schedule.task import Kind, Pipeline, Schedule, Task


def random_schedule(
    pipe: Pipeline, rng: random.Random, encoded: Collection[int] | None = None, fused: float = 0.0
) -> Schedule:
    """A complete schedule whose tasks are in a random topological order.

    The images of each microbatch of `encoded` (all of them by default) are encoded whole, in
    single units or in random groups of units; each group runs in a random pipeline of its encoder,
    and each pass of each stage is cut at random into layer ranges. About a share `fused` of the
    encoder tasks that fit goes into LLM tasks of the same device.
    """
    pools = _llm_tasks(pipe)
    for k, encoder in enumerate(pipe.encoders):
        for i in range(pipe.microbatches) if encoded is None else sorted(encoded):
            for units in _random_groups(encoder.units, rng):
                pipeline = rng.randrange(pipe.pipelines(k))
                for device in pipe.devices_of(k, pipeline):
                    for kind in (Kind.EF, Kind.EB):
                        for layers in _random_ranges(*pipe.stage_layers(k, device), rng):
                            task = Task(kind, i, units=units, layers=layers, encoder=k)
                            pools[device].append(task)
    orders = _random_order(pipe, pools, rng)
    assert orders is not None
    for _ in range(round(fused * sum(map(len, pools)))):
        joined = _fuse_one(pipe, pools, rng)
        found = joined and _random_order(pipe, joined, rng)
        if joined and found:
            pools, orders = joined, found
    return Schedule(pipe, orders)


def _fuse_one(
    pipe: Pipeline, pools: list[list[Task]], rng: random.Random
) -> list[list[Task]] | None:
    """One encoder task moved into an LLM task, None if these two do not fit."""
    device = rng.randrange(pipe.stages)
    llm = [t for t in pools[device] if not t.kind.is_encoder and not t.inside]
    encoder = [t for t in pools[device] if t.kind.is_encoder]
    if not llm or not encoder:
        return None
    outer, inner = rng.choice(llm), rng.choice(encoder)
    begin, end = pipe.layers_of(inner, device)
    room = pipe.llm_layers[outer.chunk * pipe.stages + device]
    kinds = {Kind.F: Kind.EF, Kind.B: Kind.EB}
    if kinds[outer.kind] != inner.kind or len(pipe.units_of(inner)) > 1 or end - begin > room:
        return None
    joined = [list(pool) for pool in pools]
    joined[device].remove(inner)
    joined[device].remove(outer)
    joined[device].append(dataclasses.replace(outer, inside=inner))
    return joined


def _llm_tasks(pipe: Pipeline) -> list[list[Task]]:
    return [
        [
            Task(kind, i, chunk)
            for kind in (Kind.F, Kind.B)
            for i in range(pipe.microbatches)
            for chunk in range(pipe.chunks)
            if pipe.runs(device, chunk)
        ]
        for device in range(pipe.stages)
    ]


def _random_groups(units: int, rng: random.Random) -> list[tuple[int, ...]]:
    """Units of one microbatch by task; () is all of them, as in `Task.units`."""
    split = rng.choice(("whole", "spread", "groups"))
    if split == "whole" or units == 1:
        return [()]
    if split == "spread":
        return [(u,) for u in range(units)]
    group_of = [rng.randrange(units) for _ in range(units)]
    groups = [tuple(u for u in range(units) if group_of[u] == g) for g in sorted(set(group_of))]
    return groups if len(groups) > 1 else [()]


def _random_ranges(first: int, last: int, rng: random.Random) -> list[tuple[int, int] | None]:
    """Consecutive layer ranges of a stage; None is all of them, as in `Task.layers`."""
    cuts = [layer for layer in range(first + 1, last) if rng.random() < 0.4]
    if not cuts:
        return [None]
    return list(zip([first, *cuts], [*cuts, last], strict=True))


def _random_order(
    pipe: Pipeline, pools: list[list[Task]], rng: random.Random
) -> tuple[tuple[Task, ...], ...] | None:
    """The tasks of each device, ordered so that every value is made before it is read; None if
    tasks wait for one another."""
    unordered = Schedule(pipe, tuple(map(tuple, pools)))
    flow = Dataflow.of(unordered)
    missing = {key: len(reads) for key, (reads, _) in flow.io.items()}
    ready = [key for key, count in missing.items() if not count]
    orders: list[list[Task]] = [[] for _ in pools]
    while ready:
        device, task = key = ready.pop(rng.randrange(len(ready)))
        orders[device].append(task)
        for value in flow.io[key][1]:
            reader = flow.consumer.get(value)
            if reader is None:
                continue
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    if sum(map(len, orders)) < sum(map(len, pools)):
        return None
    return tuple(map(tuple, orders))
