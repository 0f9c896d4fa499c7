"""Methods: where the encoder's tasks go between the LLM's. Every baseline is a schedule too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from optimus_jax.schedule.balanced import balanced
from optimus_jax.schedule.coarse import coarse
from optimus_jax.schedule.complete import least_cap
from optimus_jax.schedule.filled import filled, filled_whole
from optimus_jax.schedule.packing import Packing, Part
from optimus_jax.schedule.phased import phased
from optimus_jax.schedule.pipeline import ORDERS
from optimus_jax.schedule.simulate import Durations
from optimus_jax.schedule.task import Kind, Orders, Pipeline, Schedule, ScheduleError, Task


def text_only(llm: Orders, pipe: Pipeline, durations: Durations) -> Schedule:
    """The LLM alone, on features of zero: the ceiling for every other method."""
    return Schedule(pipe, llm)


def encoder_first(llm: Orders, pipe: Pipeline, durations: Durations) -> Schedule:
    """Megatron-LM: the encoder belongs to the first stage, right before and after its own chunk.

        0: EF0 F0 EF1 F1 B0 EB0 B1 EB1
        1: F0 B0 F1 B1

    An encoder of several stages belongs to the pipeline that holds the first stage; its tasks on
    the other devices stand where they lengthen the step least.
    """
    count, chunk = range(len(pipe.encoders)), pipe.first_stage // pipe.stages
    near = [k for k in count if pipe.encoders[k].stages == 1]
    orders = list(llm)
    first: list[Task] = []
    for task in llm[pipe.entry]:
        i = task.microbatch
        if task == Task(Kind.F, i, chunk):
            first += [*(Task(Kind.EF, i, encoder=k) for k in near), task]
        elif task == Task(Kind.B, i, chunk):
            first += [task, *(Task(Kind.EB, i, encoder=k) for k in near)]
        else:
            first.append(task)
    orders[pipe.entry] = tuple(first)
    parts = [
        Part(i, (u,), k)
        for i in range(pipe.microbatches)
        for k in count
        if k not in near
        for u in range(pipe.encoders[k].units)
    ]
    packing = Packing(tuple(orders), dataclasses.replace(pipe, cap=0), durations, parts)
    for n, part in enumerate(parts):
        packing.put(n, [pipe.pipeline_of(part.encoder, pipe.entry)])
    return Schedule(pipe, packing.schedule(merged=False).orders)


Method = Callable[[Orders, Pipeline, Durations], Schedule]

METHODS: dict[str, Method] = {
    "text_only": text_only,
    "encoder_first": encoder_first,
    "balanced": balanced,
    "phased": phased,
    "coarse": coarse,
    "filled_whole": filled_whole,
    "filled": filled,
}

FUSING = "filled_whole", "filled"  # put encoder tasks inside LLM tasks, where these have windows

# `balanced` runs only pipelines that `balanced_pipeline` makes
ON_ANY_PIPELINE = tuple(name for name in METHODS if name != "balanced")

FSDP = "fsdp"  # no schedule and no pipeline (measure/fsdp.py): what a bench can compare them with

# In a few words, for reports.
MEANINGS = {
    "text_only": "the LLM alone, without the encoder: what no method can be faster than",
    "encoder_first": "the encoder in the first stage, before and after its LLM work",
    "balanced": "encoder and LLM as one pipeline, layers split over its stages by cost",
    "phased": "the encoder on all devices, before the LLM's work and after it",
    "coarse": "as phased, with more of it on devices that idle longer there",
    "filled_whole": "encoder work in every idle interval, whole microbatches",
    "filled": "encoder work in every idle interval, microbatches spread over devices",
}


def schedule(method: str, order: str, pipe: Pipeline, durations: Durations) -> Schedule:
    """The schedule that `method` makes on the LLM order `order` ('1f1b' or 'gpipe').

    Raises ScheduleError if the order does not exist for these sizes, or if the method needs more
    saved encoder state than `pipe.cap` allows.
    """
    found = METHODS[method](ORDERS[order](pipe), pipe, durations)
    least = least_cap(found)
    if pipe.cap and least > pipe.cap:
        raise ScheduleError(
            f"{method} keeps more saved encoder state than a cap of {pipe.cap} microbatches shared"
            f" by the encoder's pipelines allows: it needs a cap of at least {least}"
        )
    return found
