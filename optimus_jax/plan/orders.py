"""The LLM alone under every pipeline order: step, idle time and activations in flight."""

from __future__ import annotations

import dataclasses

from optimus_jax.fill.backbone import Backbone
from optimus_jax.plan.candidates import timed
from optimus_jax.plan.cluster import Cluster, ParallelPlan
from optimus_jax.schedule.action_orders import ACTION_ORDERS, rank_of_stage
from optimus_jax.schedule.actions import Action
from optimus_jax.schedule.task import ScheduleError

# Chunks of a rank that an order can have; the others take the plan's.
_CHUNKS = {"gpipe": 1, "1f1b": 1, "zb_h1": 1, "zb_v": 2}


@dataclasses.dataclass(frozen=True, eq=False)
class OrderOutcome:
    """`idle` is the share of the step in which a rank runs no pass, mean of the ranks, collectives
    inside passes not counted; `held` the most microbatches whose activations a rank holds, a chunk
    counting as its share of the rank's layers."""

    chunks: int
    step: float
    idle: float
    held: float
    backbone: Backbone


def orders(cluster: Cluster, plan: ParallelPlan) -> dict[str, OrderOutcome]:
    """Every order that exists for these sizes. Where layers do not fill its chunks, it is left
    out."""
    found = {}
    n, layers = cluster.microbatches(plan), cluster.llm.model.layers
    for name, make in ACTION_ORDERS.items():
        chunks = _CHUNKS.get(name, plan.chunks)
        if plan.pp * chunks > layers:
            continue
        try:
            table = make(plan.pp, n, chunks)
        except ScheduleError:
            continue
        one = dataclasses.replace(plan, chunks=chunks)
        backbone = timed(cluster, one, table, rank_of_stage(name, plan.pp, chunks))
        bubbles = backbone.bubbles()
        idle = sum(bubbles.values()) - bubbles["tp"]
        held = max(_most_held(row) for row in table) / chunks
        found[name] = OrderOutcome(chunks, backbone.step, idle / backbone.step, held, backbone)
    return found


def _most_held(row: tuple[Action, ...]) -> int:
    """Most chunk passes of which a rank holds the activations: from F to B, or to W."""
    held = most = 0
    for action in row:
        held += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        most = max(most, held)
    return most
