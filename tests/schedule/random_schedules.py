"""Random valid schedules: any legal order of the LLM's tasks, any split of the encoder's."""

from __future__ import annotations

import random
from collections.abc import Collection

from optimus_jax.schedule.dataflow import Dataflow
from optimus_jax.schedule.task import Kind, Pipeline, Schedule, Task


def random_schedule(
    pipe: Pipeline, rng: random.Random, encoded: Collection[int] | None = None
) -> Schedule:
    """A complete schedule whose tasks are in a random topological order.

    The images of each microbatch of `encoded` (all of them by default) are encoded whole, in
    single units or in random groups of units; each group runs on a random device, its backward on
    the same one, and each of its two passes is cut at random into layer ranges.
    """
    pools = _llm_tasks(pipe)
    for i in range(pipe.microbatches) if encoded is None else sorted(encoded):
        for units in _random_groups(pipe.units, rng):
            device = rng.randrange(pipe.stages)
            for kind in (Kind.EF, Kind.EB):
                for layers in _random_ranges(pipe.encoder_layers, rng):
                    pools[device].append(Task(kind, i, units=units, layers=layers))
    return Schedule(pipe, _random_order(pipe, pools, rng))


def _llm_tasks(pipe: Pipeline) -> list[list[Task]]:
    return [
        [
            Task(kind, i, chunk)
            for kind in (Kind.F, Kind.B)
            for i in range(pipe.microbatches)
            for chunk in range(pipe.chunks)
        ]
        for _ in range(pipe.stages)
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


def _random_ranges(layers: int, rng: random.Random) -> list[tuple[int, int] | None]:
    """Consecutive layer ranges [first, end); None is all layers, as in `Task.layers`."""
    cuts = [layer for layer in range(1, layers) if rng.random() < 0.4]
    if not cuts:
        return [None]
    return list(zip([0, *cuts], [*cuts, layers], strict=True))


def _random_order(
    pipe: Pipeline, pools: list[list[Task]], rng: random.Random
) -> tuple[tuple[Task, ...], ...]:
    """The tasks of each device, ordered so that every value is made before it is read."""
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
    return tuple(map(tuple, orders))
