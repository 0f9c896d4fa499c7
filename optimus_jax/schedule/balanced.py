"""Encoder and LLM as one coupled pipeline, its layers split over the virtual stages by cost."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from optimus_jax.schedule.pipeline import ORDERS
from optimus_jax.schedule.simulate import Durations
from optimus_jax.schedule.task import (
    EncoderPipeline,
    Kind,
    Orders,
    Pipeline,
    Schedule,
    ScheduleError,
    Task,
)


def balanced_pipeline(
    stages: int,
    microbatches: int,
    chunks: int,
    encoder: Sequence[float],
    llm: Sequence[float],
    cap: int = 0,
) -> Pipeline:
    """The pipeline in which the most costly virtual stage costs least.

    `encoder` and `llm`: seconds of each layer's forward and backward of one microbatch; patch
    embedding, projector, token embedding and head count with the first and last layer of their
    part. Every virtual stage gets at least one layer, the encoder's lie in the first `stages` of
    them, and of equal splits earlier virtual stages take more layers.

    Raises ScheduleError if there are fewer layers than virtual stages, or too many of the encoder.
    """
    count, costs = stages * chunks, [*encoder, *llm]
    if not encoder or not llm or len(costs) < count:
        raise ScheduleError(
            f"balanced splits {len(encoder)} encoder and {len(llm)} LLM layers over {count} virtual"
            f" stages ({stages} stages x {chunks} chunks): each needs one, and both parts some"
        )
    sizes = _split(costs, count, stages, len(encoder))
    bounds = [0, *itertools.accumulate(sizes)]
    in_encoder = [min(bound, len(encoder)) for bound in bounds]
    encoder_layers = [b - a for a, b in itertools.pairwise(in_encoder)]
    llm_layers = tuple(n - e for n, e in zip(sizes, encoder_layers, strict=True))
    pipeline = EncoderPipeline(tuple(encoder_layers[:stages]), units=1)
    return Pipeline(stages, microbatches, chunks, llm_layers, (pipeline,), cap)


def _split(costs: list[float], count: int, stages: int, encoder: int) -> list[int]:
    """Layers of each virtual stage: the least bottleneck by dynamic programming, then as many
    layers as it allows to one stage after another."""
    total = len(costs)
    until = [0.0, *itertools.accumulate(costs)]
    never = float("inf")
    # least[s][i]: bottleneck of the first i layers on the first s stages
    least = [[0.0] + [never] * total]
    for s in range(count):
        first = encoder if s >= stages else 0  # no encoder layers beyond the first round of stages
        row = [never] * (total + 1)
        for i in range(s + 1, total + 1):
            row[i] = min(
                (max(least[s][j], until[i] - until[j]) for j in range(max(s, first), i)),
                default=never,
            )
        least.append(row)
    bottleneck = least[count][total]
    if bottleneck == never:
        raise ScheduleError(
            f"balanced has no split of {encoder} encoder layers over the first {stages} of {count}"
            f" virtual stages that leaves an LLM layer for each of the others"
        )
    sizes: list[int] = []
    start = 0
    for s in range(count):
        last = total - (count - s - 1)  # one layer for each stage that follows
        end = last
        if s < count - 1:
            fitting = (i for i in range(start + 1, last + 1) if _costs(until, start, i, bottleneck))
            end = max(fitting)
        sizes.append(end - start)
        start = end
    return sizes


def _costs(until: list[float], start: int, end: int, most: float) -> bool:
    """Whether layers [start, end) cost at most so much."""
    return until[end] - until[start] <= most * (1 + 1e-12)


def balanced(llm: Orders, pipe: Pipeline, durations: Durations) -> Schedule:
    """Runs encoder and LLM layers in the order of one pipeline of both, 1F1B or whatever order the
    LLM's tasks have; a stage with layers of both runs those of the encoder first in forward and
    last in backward.

        0: EF0 EF1 EF2 EB0 EB1 EB2
        1: EF0 F0 EF1 F1 B0 EB0 EF2 F2 B1 EB1 B2 EB2
        2: F0 B0 F1 B1 F2 B2

    Raises ScheduleError for a pipeline that `balanced_pipeline` does not make.
    """
    last = pipe.encoders[0].last if len(pipe.encoders) == 1 else -1
    first = pipe.encoders[0] if last >= 0 else EncoderPipeline()
    if (
        last < 0
        or first.stages != pipe.stages
        or first.units != 1
        or pipe.first_stage not in (last, last + 1)
    ):
        raise ScheduleError(
            "balanced runs one encoder of as many stages as the LLM, with one unit, whose last"
            " layers stand where the LLM's first do or one stage before (balanced_pipeline);"
            f" got {pipe}"
        )
    whole = dataclasses.replace(pipe, llm_layers=(1,) * pipe.virtual_stages)
    order = next((make for make in ORDERS.values() if make(pipe) == llm), None)
    if order is None:
        raise ScheduleError(f"balanced knows the orders {', '.join(ORDERS)} only")
    rows = []
    for device, positions in enumerate(order(whole)):
        row: list[Task] = []
        for task in positions:
            own = [task] if pipe.runs(device, task.chunk) else []
            if task.chunk == 0 and device <= last:
                kind = Kind.EF if task.kind == Kind.F else Kind.EB
                encoder = [Task(kind, task.microbatch)]
                own = encoder + own if kind == Kind.EF else own + encoder
            row += own
        rows.append(tuple(row))
    return Schedule(pipe, tuple(rows))
