"""Methods: where the encoder's tasks go between the LLM's. Every baseline is a schedule too."""

from __future__ import annotations

from collections.abc import Callable

from optimus_jax.schedule.coarse import coarse
from optimus_jax.schedule.filled import filled, filled_whole
from optimus_jax.schedule.pipeline import ORDERS
from optimus_jax.schedule.simulate import Durations
from optimus_jax.schedule.task import Kind, Orders, Pipeline, Schedule, Task


def text_only(llm: Orders, pipe: Pipeline, durations: Durations) -> Schedule:
    """The LLM alone, on features of zero: the ceiling for every other method."""
    return Schedule(pipe, llm)


def encoder_first(llm: Orders, pipe: Pipeline, durations: Durations) -> Schedule:
    """Megatron-LM: the encoder belongs to the first stage, right before and after its own chunk.

    0: EF0 F0 EF1 F1 B0 EB0 B1 EB1
    1: F0 B0 F1 B1
    """
    first: list[Task] = []
    for task in llm[0]:
        if task == Task(Kind.F, task.microbatch):
            first += [Task(Kind.EF, task.microbatch), task]
        elif task == Task(Kind.B, task.microbatch):
            first += [task, Task(Kind.EB, task.microbatch)]
        else:
            first.append(task)
    return Schedule(pipe, (tuple(first), *llm[1:]))


def phased(llm: Orders, pipe: Pipeline, durations: Durations) -> Schedule:
    """Decoupled plans without filling: equal shares of encoder forwards before each device's LLM
    tasks and of backwards after them. Microbatches that do not divide are spread in units.
    (`coarse` uses the same places, but gives more to devices with larger bubbles.)

        0: EF0 EF2.0 F0 F1 B0 F2 B1 B2 EB0 EB2.0
        1: EF1 EF2.1 F0 B0 F1 B1 F2 B2 EB1 EB2.1
    """
    even = pipe.microbatches - pipe.microbatches % pipe.stages
    orders = []
    for device, order in enumerate(llm):
        parts: list[tuple[int, tuple[int, ...]]] = [
            (i, ()) for i in range(device, even, pipe.stages)
        ]
        mine = tuple(range(device, pipe.units, pipe.stages))
        parts += [(i, mine) for i in range(even, pipe.microbatches) if mine]
        forwards = tuple(Task(Kind.EF, i, units=u) for i, u in parts)
        backwards = tuple(Task(Kind.EB, i, units=u) for i, u in parts)
        orders.append(forwards + order + backwards)
    return Schedule(pipe, tuple(orders))


Method = Callable[[Orders, Pipeline, Durations], Schedule]

METHODS: dict[str, Method] = {
    "text_only": text_only,
    "encoder_first": encoder_first,
    "phased": phased,
    "coarse": coarse,
    "filled_whole": filled_whole,
    "filled": filled,
}


FSDP = "fsdp"  # no schedule and no pipeline (measure/fsdp.py): what a bench can compare them with

# In a few words, for reports.
MEANINGS = {
    "text_only": "the LLM alone, without the encoder: what no method can be faster than",
    "encoder_first": "the encoder in the first stage, before and after its LLM work",
    "phased": "the encoder on all devices, before the LLM's work and after it",
    "coarse": "as phased, with more of it on devices that idle longer there",
    "filled_whole": "encoder work in every idle interval, whole microbatches",
    "filled": "encoder work in every idle interval, microbatches spread over devices",
}


def schedule(method: str, order: str, pipe: Pipeline, durations: Durations) -> Schedule:
    """The schedule that `method` makes on the LLM order `order` ('1f1b' or 'gpipe').

    Raises ScheduleError if the order does not exist for these sizes.
    """
    return METHODS[method](ORDERS[order](pipe), pipe, durations)
