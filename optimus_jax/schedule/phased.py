"""Decoupled plans without filling: the encoder before and after the LLM, in equal shares."""

from __future__ import annotations

from optimus_jax.schedule.simulate import Durations
from optimus_jax.schedule.task import Kind, Orders, Pipeline, Schedule, Task


def phased(llm: Orders, pipe: Pipeline, durations: Durations) -> Schedule:
    """Decoupled plans without filling: equal shares of encoder forwards before each device's LLM
    tasks and of backwards after them. Microbatches that do not divide are spread in units, and so
    are those of an encoder of several stages, whose pipelines then work on unit after unit.
    (`coarse` uses the same places, but gives more to devices with larger bubbles.)

        0: EF0 EF2.0 F0 F1 B0 F2 B1 B2 EB0 EB2.0
        1: EF1 EF2.1 F0 B0 F1 B1 F2 B2 EB1 EB2.1
    """
    around: list[tuple[list[Task], list[Task]]] = [([], []) for _ in llm]
    for k, encoder in enumerate(pipe.encoders):
        pipelines = pipe.pipelines(k)
        even = pipe.microbatches - pipe.microbatches % pipelines
        for j in range(pipelines):
            parts: list[tuple[int, tuple[int, ...]]] = []
            for i in range(j, even, pipelines):
                one_by_one = range(encoder.units) if encoder.stages > 1 else ()
                parts += [(i, (u,)) for u in one_by_one] or [(i, ())]
            mine = tuple(range(j, encoder.units, pipelines))
            for i in range(even, pipe.microbatches) if mine else ():
                parts += [(i, (u,)) for u in mine] if encoder.stages > 1 else [(i, mine)]
            for device in pipe.devices_of(k, j):
                for tasks, kind in zip(around[device], (Kind.EF, Kind.EB), strict=True):
                    tasks += [pipe.short(Task(kind, i, 0, u, None, k), device) for i, u in parts]
    orders = zip(around, llm, strict=True)
    return Schedule(pipe, tuple((*before, *order, *after) for (before, after), order in orders))
