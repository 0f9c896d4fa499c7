"""Small LLM pipelines with encoders beside them: one by hand, any number drawn."""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st

from optimus_jax.fill.backbone import Backbone, ChunkPass, backbone
from optimus_jax.fill.encoder import EncoderPlan, LayerPass, Work, work
from optimus_jax.fill.windows import Kernel, SlotRule
from optimus_jax.schedule.action_orders import deferred_warmup, interleaved_1f1b, one_f_one_b
from optimus_jax.schedule.actions import ActionTable
from optimus_jax.schedule.zero_bubble import zb_h1


def one_kind(stages: int, seconds: float) -> list[ChunkPass]:
    """The same pass in every virtual stage, all compute."""
    return [ChunkPass(((seconds, False),))] * stages


def by_hand(all_gather: float = 0.0, reduce_scatter: float = 0.0) -> Backbone:
    """Two ranks, two microbatches, F takes 1 and B 2:

    0: F0 F1 .. .. B0 B0 .. B1 B1
    1: .. F0 B0 B0 F1 B1 B1 .. ..
    """
    return backbone(
        one_f_one_b(2, 2),
        (0, 1),
        {"F": one_kind(2, 1.0), "B": one_kind(2, 2.0)},
        all_gather=all_gather,
        reduce_scatter=reduce_scatter,
    )


def kernels(full: float, *counts: int, pipelines: int = 1, compute: float | None = None) -> Work:
    """So many kernels of `full` seconds in each encoder stage."""
    compute = full if compute is None else compute
    unit = Kernel(compute / pipelines, full / pipelines)
    return Work(Kernel(compute, full), counts, unit, counts)


@dataclasses.dataclass(frozen=True)
class Case:
    """`plans` hold whole kernels, `cut` the same with kernels cut."""

    backbone: Backbone
    plans: list[EncoderPlan]
    cut: list[EncoderPlan]
    rule: SlotRule


EIGHTHS = st.integers(1, 12).map(lambda n: n / 8)
SOMETIMES = st.booleans()
LITTLE = st.sampled_from((0.0, 0.0, 0.125))


@st.composite
def chunk_passes(draw: st.DrawFn, slots: bool) -> ChunkPass:
    compute, busy = draw(EIGHTHS) * draw(st.sampled_from((1, 2))), draw(LITTLE)
    if not slots:
        return ChunkPass(((compute, False),), busy)
    return ChunkPass(((compute / 2, False), (draw(EIGHTHS) / 4, True)) * 2, busy)


@st.composite
def encoders(draw: st.DrawFn, ranks: int, frozen: bool) -> tuple[EncoderPlan, EncoderPlan]:
    stages = draw(st.sampled_from([d for d in range(1, ranks + 1) if ranks % d == 0]))
    copies = draw(st.sampled_from((1, 1, 2, 3)))
    layers = stages + draw(st.integers(0, 1))
    passes = [
        LayerPass(draw(EIGHTHS), draw(LITTLE), draw(st.integers(1, 2)))
        for _ in range(1 + (not frozen))
    ]

    def plan(cut: float | None) -> EncoderPlan:
        made = [work(p, layers, stages, ranks // stages * copies, cut) for p in passes]
        return EncoderPlan(ranks, stages, copies, made[0], None if frozen else made[1], frozen)

    return plan(None), plan(draw(st.sampled_from((None, 0.2, 0.4))))


@st.composite
def cases(
    draw: st.DrawFn,
    most_encoders: int = 2,
    frozen: st.SearchStrategy[bool] = SOMETIMES,
    split: bool = False,
) -> Case:
    """`split` takes backwards in two halves, in the order ZB-H1."""
    ranks, chunks = draw(st.integers(1, 4)), 1 if split else draw(st.sampled_from((1, 1, 2)))
    count = draw(st.integers(1, 6)) if chunks == 1 else ranks * draw(st.integers(1, 2))
    table: ActionTable
    if split:
        table = zb_h1(ranks, count)
    elif chunks == 1:
        table = one_f_one_b(ranks, count)
    else:
        warmup = draw(st.sampled_from((None, deferred_warmup(ranks, chunks, count))))
        table = interleaved_1f1b(ranks, count, chunks, warmup)
    slots = draw(st.booleans())
    passes = {}
    for kind in "FIW" if split else "FB":
        one = chunk_passes(slots and kind != "W")
        passes[kind] = [draw(one)] * (ranks * chunks)
        if draw(st.booleans()):
            passes[kind] = [draw(one) for _ in range(ranks * chunks)]
    made = backbone(
        table,
        [v % ranks for v in range(ranks * chunks)],
        passes,
        all_gather=draw(LITTLE) * 8,
        reduce_scatter=draw(LITTLE) * 8,
        latency=draw(LITTLE),
    )
    rule = SlotRule(
        draw(st.booleans()),
        draw(st.sampled_from((1.0, 0.5, 1 / 3, 0.0))),
        draw(st.sampled_from((1.0, 1.25, 2.0))),
    )
    pairs = [
        draw(encoders(ranks, draw(frozen))) for _ in range(draw(st.integers(1, most_encoders)))
    ]
    return Case(made, [p for p, _ in pairs], [c for _, c in pairs], rule)
