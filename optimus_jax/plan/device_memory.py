"""Bytes on the fullest device of a cluster's plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from optimus_jax.cost.memory import (
    MemoryTable,
    embedding_activation_bytes,
    head_activation_bytes,
    in_flight,
    layer_activation_bytes,
    state_bytes,
)
from optimus_jax.fill.encoder import EncoderPlan
from optimus_jax.plan.cluster import Cluster, EncoderSpec, ParallelPlan


def llm_memory(cluster: Cluster, plan: ParallelPlan) -> MemoryTable:
    """States and activations of the LLM on the first rank, which holds most microbatches; embedding
    and head are counted on every rank, as the executor has them."""
    llm, rows = cluster.llm, cluster.parallel.microbatch
    model, length = llm.model, llm.length
    layers = math.ceil(model.layers / plan.pp)
    entries = (layers * model.layer_parameters + 2 * model.embedding_parameters) / plan.tp
    states = state_bytes(entries, plan.dp, trained=not llm.frozen)
    microbatches = cluster.microbatches(plan)
    held = in_flight("1f1b", plan.pp, 0, plan.chunks, microbatches)
    chunk = math.ceil(model.layers / (plan.pp * plan.chunks))
    one = chunk * layer_activation_bytes(model, rows, length, plan.tp, llm.recompute)
    again = 0.0
    if llm.recompute == "full":  # the layer whose backward runs keeps the rest for that time
        again = layer_activation_bytes(model, rows, length, plan.tp, "selective")
    ends = embedding_activation_bytes(model, rows, length, plan.tp) * min(plan.pp, microbatches)
    ends += head_activation_bytes(model, rows, length, plan.tp)
    buffers = 4 * 2.0 * rows * length * model.width / plan.tp  # send and receive, both ways
    return MemoryTable(
        llm_weights_gradients=states.weights_gradients,
        llm_optimiser=states.optimiser,
        llm_activations=held * one + again + ends,
        communication_buffers=buffers,
    )


def with_encoders(
    base: MemoryTable,
    cluster: Cluster,
    plan: ParallelPlan,
    encoders: Mapping[str, EncoderPlan],
    held: Sequence[float],
) -> MemoryTable:
    """The same with encoders of which each pipeline holds `held` microbatches at most."""
    weights = optimiser = activations = features = 0.0
    for (name, placed), count in zip(encoders.items(), held, strict=True):
        spec = cluster.encoders[name]
        tp = plan.tp // placed.copies
        layers = math.ceil(spec.model.layers / placed.stages)
        entries = layers * spec.model.layer_parameters / tp
        states = state_bytes(entries, plan.dp * placed.pipelines, trained=not spec.frozen)
        weights += states.weights_gradients
        optimiser += states.optimiser
        activations += count * layers * encoder_layer_bytes(cluster, spec, tp)
        if spec.recompute == "full" and not spec.frozen:
            activations += _layer(cluster, spec, tp, "selective")
        positions = cluster.parallel.microbatch * spec.tokens
        features += 2.0 * positions * cluster.llm.model.width / placed.copies
    return MemoryTable(
        llm_weights_gradients=base.llm_weights_gradients,
        llm_optimiser=base.llm_optimiser,
        llm_activations=base.llm_activations,
        encoder_weights_gradients=weights,
        encoder_optimiser=optimiser,
        encoder_activations=activations,
        communication_buffers=base.communication_buffers + 2 * features,
    )


def encoder_layer_bytes(cluster: Cluster, spec: EncoderSpec, tp: int) -> float:
    """Bytes that an encoder layer keeps of one microbatch; a frozen one keeps none."""
    return 0.0 if spec.frozen else _layer(cluster, spec, tp, spec.recompute)


def _layer(cluster: Cluster, spec: EncoderSpec, tp: int, policy: str) -> float:
    rows = cluster.parallel.microbatch * (spec.tokens // spec.image_tokens)
    return layer_activation_bytes(spec.model, rows, spec.image_tokens, tp, policy)
