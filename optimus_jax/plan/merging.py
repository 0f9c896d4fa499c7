"""Neighbouring encoder tasks of a device as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from optimus_jax.schedule.durations import Durations
from optimus_jax.schedule.task import Kind, Orders, Pipeline, Task

_EPSILON = 1e-9


def merged(orders: Orders, pipe: Pipeline, durations: Durations) -> Orders:
    """The same work in fewer tasks: layers of the same units that follow one another become one
    range. At both ends of a device's order tasks stay apart where the collectives over replicas end
    and begin, so that as many as fit run beside those."""
    found = []
    for device, order in enumerate(orders):
        ahead = _beside(order, device, pipe, durations, Kind.EF, durations.gather)
        behind = _beside(order[::-1], device, pipe, durations, Kind.EB, durations.scatter)
        edges = {ahead, len(order) - behind}
        row: list[Task] = []
        for k, task in enumerate(order):
            joined = _joined(row[-1], task) if row and k not in edges else None
            if joined:
                row[-1] = joined
            else:
                row.append(task)
        found.append(tuple(pipe.short(task, device) for task in row))
    return tuple(found)


def _beside(
    order: Sequence[Task],
    device: int,
    pipe: Pipeline,
    durations: Durations,
    kind: Kind,
    limit: float,
) -> int:
    """How many tasks at an end of the order fit into a collective."""
    count, time = 0, 0.0
    for task in order:
        time += durations.of(task, device, pipe)
        if task.kind != kind or time > limit + _EPSILON:
            break
        count += 1
    return count


def _joined(a: Task, b: Task) -> Task | None:
    """Both as one task, if they are the same units' and their layers follow one another."""
    if not a.kind.is_encoder or a.inside or not a.layers or not b.layers:
        return None
    low, high = (a, b) if a.kind == Kind.EF else (b, a)
    assert low.layers and high.layers
    layers = low.layers[0], high.layers[1]
    if low.layers[1] != high.layers[0]:
        return None
    one = dataclasses.replace(a, layers=layers)
    return one if one == dataclasses.replace(b, layers=layers) else None
