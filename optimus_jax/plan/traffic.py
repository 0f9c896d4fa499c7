"""Bytes that one device sends in a step, by link, of a cluster's plan.

Counted on the busiest device and one way: what a device receives is as much. Only what carries
data is counted: a link between stages is permuted both ways at each exchange (runtime/tick.py), so
that as much again may travel that nobody reads. Counted are

- tensor parallelism: all-gathers and reduce-scatters of sequence parallelism at both ends of
  attention and MLP, (tp - 1) / tp of an array [rows, length, width] in bfloat16 each
  (cost/kernels.py). Embedding, projector and head, one collective of about that size each, are left
  out. Encoder pipelines on the same ranks, of fewer devices than the LLM's tp, are lanes that share
  a microbatch's pictures: its features are gathered from them where the LLM takes them;
- pipeline: every chunk's output and its gradient, of which each device has and sends 1 / tp; and
  features and their gradients, which are whole on every device of an encoder pipeline
  (runtime/slots.py), so that each device sends all positions of its lane's pictures;
- replicas (ZeRO-1, parallel/reduction.py): weights gathered as bfloat16, since they are cast before
  they travel, and gradients scattered as float32, (n - 1) / n of each over n replicas.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from optimus_jax.cost.hardware import Chip, Link
from optimus_jax.cost.kernels import layer_kernels
from optimus_jax.cost.transformer import Transformer
from optimus_jax.fill.encoder import EncoderPlan
from optimus_jax.plan.cluster import Cluster, EncoderSpec, ParallelPlan

WEIGHT, GRADIENT, ACTIVATION = 2, 4, 2  # bytes of an entry that travels


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that the busiest device sends in one step. `features` are those that the LLM's first
    stage gets, or their gradients, whichever a device sends more of, as if that stage encoded none
    itself; `lanes` those that it gathers. The LLM and every encoder gather and scatter on their
    own; here they are added up."""

    llm_tp: float = 0.0
    encoder_tp: float = 0.0
    llm_pp: float = 0.0
    encoder_pp: float = 0.0
    features: float = 0.0
    lanes: float = 0.0
    dp_gather: float = 0.0
    dp_scatter: float = 0.0

    @property
    def tp(self) -> float:
        return self.llm_tp + self.encoder_tp + self.lanes

    @property
    def pp(self) -> float:
        return self.llm_pp + self.encoder_pp + self.features

    @property
    def dp(self) -> float:
        return self.dp_gather + self.dp_scatter

    def rows(self, plan: ParallelPlan, chip: Chip) -> dict[str, tuple[float, Link]]:
        """In words: the bytes, and the link that they travel over. Stages and replicas are taken to
        lie on other machines, if there are others."""
        link = chip.group_link(plan.dp * plan.pp * plan.tp)
        return {
            "tensor shards": (self.tp, chip.group_link(plan.tp)),
            "stages": (self.pp, link),
            "replicas, weights gathered": (self.dp_gather, link),
            "replicas, gradients scattered": (self.dp_scatter, link),
        }


def traffic(cluster: Cluster, plan: ParallelPlan, encoders: Mapping[str, EncoderPlan]) -> Traffic:
    """The traffic of an LLM plan with encoders on plans of their own beside it. A pipeline's
    microbatches are shared out equally to the pipelines of an encoder."""
    llm, n = cluster.llm, cluster.microbatches(plan)
    rows, chip = cluster.parallel.microbatch, cluster.chip
    layers = math.ceil(llm.model.layers / plan.pp)
    ends = 2 * llm.model.embedding_parameters / plan.tp
    entries = layers * llm.model.layer_parameters / plan.tp
    replicas, all_ranks = plan.dp, plan.dp * plan.pp  # every rank has embedding and head
    trained = not llm.frozen
    gather = sent(entries, replicas, WEIGHT) + sent(ends, all_ranks, WEIGHT)
    scatter = sent(entries, replicas, GRADIENT) + sent(ends, all_ranks, GRADIENT)
    found = Traffic(
        llm_tp=n
        * layers
        * layer_bytes(llm.model, rows, llm.length, plan.tp, chip, llm.recompute, frozen=llm.frozen),
        llm_pp=n * boundaries(plan.pp, plan.chunks) * _share(rows * llm.length, llm.model, plan.tp),
        dp_gather=trained * gather,
        dp_scatter=trained * scatter,
    )
    for name, placed in encoders.items():
        found = _with(found, cluster, plan, cluster.encoders[name], placed)
    return found


def _with(
    found: Traffic, cluster: Cluster, plan: ParallelPlan, spec: EncoderSpec, placed: EncoderPlan
) -> Traffic:
    n, tp = cluster.microbatches(plan), plan.tp // placed.copies
    mine = n / placed.pipelines  # microbatches of one encoder pipeline
    layers = math.ceil(spec.model.layers / placed.stages)
    images = cluster.parallel.microbatch * (spec.tokens // spec.image_tokens)
    positions = cluster.parallel.microbatch * spec.tokens
    layer = layer_bytes(
        spec.model,
        images,
        spec.image_tokens,
        tp,
        cluster.chip,
        spec.recompute,
        forward_only=spec.frozen,
    )
    hidden = _share(positions, spec.model, tp) * boundaries(placed.stages, 1, not spec.frozen)
    # out of the encoder's last stage, and gradients back out of the LLM's first
    whole = _share(positions, cluster.llm.model, 1)
    there = mine * whole
    back = 0.0 if spec.frozen else n * whole / placed.copies
    replicas = plan.dp * placed.pipelines
    entries = 0.0 if spec.frozen else layers * spec.model.layer_parameters / tp
    return dataclasses.replace(
        found,
        encoder_tp=found.encoder_tp + mine * layers * layer,
        encoder_pp=found.encoder_pp + mine * hidden,
        features=found.features + (0.0 if plan.pp == 1 else max(there, back)),
        lanes=found.lanes + n * sent(whole, placed.copies, 1),
        dp_gather=found.dp_gather + sent(entries, replicas, WEIGHT),
        dp_scatter=found.dp_scatter + sent(entries, replicas, GRADIENT),
    )


def sent(entries: float, replicas: int, size: int) -> float:
    """Bytes that a device sends so that `entries` of `size` bytes are gathered from, or scattered
    over, so many replicas: (n - 1) / n of them, whatever the algorithm."""
    return size * entries * (replicas - 1) / replicas


def boundaries(stages: int, chunks: int, backward: bool = True) -> int:
    """Transfers that the busiest rank sends for one microbatch: each chunk's output, but for the
    last one's, and each chunk's gradient, but for the first one's."""
    if stages == 1:
        return 0
    if not backward:
        return chunks
    return 2 * chunks - (stages == 2)


def layer_bytes(
    model: Transformer,
    rows: int,
    length: int,
    tp: int,
    chip: Chip,
    recompute: str,
    frozen: bool = False,
    forward_only: bool = False,
) -> float:
    """Bytes that a device sends in the collectives of one layer for one microbatch, forward and
    backward, and the forward's again under full recompute."""
    kernels = layer_kernels(model, rows, length, tp, chip, frozen=frozen)
    passes = [*kernels.forward] if forward_only else [*kernels.forward, *kernels.backward]
    if recompute == "full" and not forward_only:
        passes += kernels.recompute
    return sum(kernel.sent for kernel in passes)


def _share(positions: int, model: Transformer, tp: int) -> float:
    """Bytes of one device's share of so many positions as wide as the model."""
    return ACTIVATION * positions * model.width / tp
