"""ViT-22B beside GPT-175B on pipelines of 8 ranks and 12 chunks, the Optimus paper's large job."""

from __future__ import annotations

from optimus_jax.fill.backbone import Backbone, ChunkPass, backbone
from optimus_jax.fill.encoder import EncoderPlan, LayerPass, work
from optimus_jax.schedule.action_orders import deferred_warmup, interleaved_1f1b

RANKS, CHUNKS, SLOT = 8, 12, 300e-6
FORWARD = LayerPass(0.8e-3, 0.6e-3, 3)
BACKWARD = LayerPass(1.4e-3, 0.6e-3, 3)


def line(
    microbatches: int, all_gather: float, scatter: float, efficiency: float, busy: float
) -> Backbone:
    """15.26 TFLOP a layer on 8 devices, four exposed collectives each way."""
    compute = 15.26e12 / (RANKS * 989e12 * efficiency)

    def chunk(times: float) -> ChunkPass:
        return ChunkPass(((times * compute / 4, False), (SLOT, True)) * 4, busy)

    count = RANKS * CHUNKS
    return backbone(
        interleaved_1f1b(RANKS, microbatches, CHUNKS, deferred_warmup(RANKS, CHUNKS)),
        [v % RANKS for v in range(count)],
        {"F": [chunk(1)] * count, "B": [chunk(2)] * count},
        all_gather=all_gather,
        reduce_scatter=scatter,
    )


def vit(stages: int = 1, cut: float | None = None) -> EncoderPlan:
    """48 layers on all 8 devices of a rank."""
    pipelines = RANKS // stages
    forward, backward = (work(layer, 48, stages, pipelines, cut) for layer in (FORWARD, BACKWARD))
    return EncoderPlan(RANKS, stages, 1, forward, backward)
