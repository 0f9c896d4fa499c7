"""Methods that put encoders into the LLM's own pipeline, on a cluster."""

from __future__ import annotations

import dataclasses

from optimus_jax.cost.flops import layer_flops_forward
from optimus_jax.cost.memory import MemoryTable
from optimus_jax.errors import UserError
from optimus_jax.fill.baselines import (
    Baseline,
    Inside,
    balanced,
    encoder_first,
    encoder_first_tuned,
)
from optimus_jax.plan.candidates import without_work
from optimus_jax.plan.device_memory import with_encoders
from optimus_jax.plan.outcome import Outcome
from optimus_jax.plan.search import Search
from optimus_jax.plan.utilisation import utilisation

METHODS = ("encoder_first", "encoder_first_tuned", "balanced")


def inside(search: Search, outcomes: dict[str, Outcome], refused: dict[str, str]) -> None:
    """Methods that put the encoder into the LLM's pipeline."""
    cluster, plan = search.cluster, search.plan
    try:
        inside = pipeline(search)
    except UserError as error:  # an encoder that the LLM's tp does not divide
        refused.update(dict.fromkeys(METHODS, str(error)))
        return
    spec = next(iter(cluster.encoders.values()))
    weights = (
        layer_flops_forward(spec.model, spec.image_tokens) * spec.tokens / spec.image_tokens,
        layer_flops_forward(cluster.llm.model, cluster.llm.length),
    )
    for name, make in (
        ("encoder_first", lambda: encoder_first(inside)),
        ("encoder_first_tuned", lambda: encoder_first_tuned(inside)),
        ("balanced", lambda: balanced(inside, plan.chunks, weights)),
    ):
        try:
            found = make()
        except ValueError as error:
            refused[name] = str(error)
            continue
        table = _memory(search, found)
        outcomes[name] = Outcome(
            name,
            found.step,
            *utilisation(cluster, found.step),
            table,
            table.fits(cluster.capacity),
            {},
            baseline=found,
        )


def pipeline(search: Search) -> Inside:
    """The pipeline that holds encoder and LLM layers."""
    cluster, plan = search.cluster, search.plan
    return Inside(
        plan.pp,
        cluster.microbatches(plan),
        tuple(
            (spec.model.layers, search.times.encoder_seconds(spec, plan.tp))
            for spec in cluster.encoders.values()
        ),
        cluster.llm.model.layers,
        search.times.llm_layer(),
        cluster.assume.p2p_busy_s,
        search.times.latency(),
        search.backbone.all_gather,
        search.backbone.reduce_scatter,
    )


def _memory(search: Search, found: Baseline) -> MemoryTable:
    """On the rank that holds most: its layers of both kinds, with as many microbatches."""
    cluster, plan = search.cluster, search.plan
    tables = []
    for rank in range(plan.pp):
        layers = sum(found.llm_layers[rank :: plan.pp])
        scale = layers / (cluster.llm.model.layers / plan.pp)
        base = search.base
        llm = MemoryTable(
            llm_weights_gradients=base.llm_weights_gradients * scale,
            llm_optimiser=base.llm_optimiser * scale,
            llm_activations=base.llm_activations * scale,
            communication_buffers=base.communication_buffers,
        )
        share = sum(found.encoder_layers[rank :: plan.pp]) / sum(found.encoder_layers)
        whole = {name: without_work(plan.pp, 1, 1) for name in cluster.encoders}
        held = [min(plan.pp - rank, cluster.microbatches(plan))] * len(whole)
        beside = with_encoders(llm, cluster, plan, whole, held)
        tables.append(
            dataclasses.replace(
                beside,
                encoder_weights_gradients=beside.encoder_weights_gradients * share,
                encoder_optimiser=beside.encoder_optimiser * share,
                encoder_activations=beside.encoder_activations * share,
            )
        )
    return max(tables, key=lambda table: table.total)
