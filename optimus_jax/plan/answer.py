"""The planner's answer to a cluster's job: every method, and which one to use."""

from __future__ import annotations

import time
from collections.abc import Mapping

from optimus_jax.errors import UserError
from optimus_jax.plan.beside import beside
from optimus_jax.plan.cluster import Cluster
from optimus_jax.plan.inside import inside
from optimus_jax.plan.orders import orders
from optimus_jax.plan.outcome import Answer, Outcome
from optimus_jax.plan.search import Search
from optimus_jax.plan.utilisation import utilisation

_NOT_RUN = ("filled_zb",)  # simulated only: the executor runs whole backwards
_PAYS = 0.01  # filling is recommended from this gain over phased on


def answer(cluster: Cluster) -> Answer:
    """All methods on a cluster, simulated. Raises UserError if no plan exists or none fits, and
    ScheduleError if there is no order for these sizes."""
    search = Search(cluster)
    step = search.backbone.step
    fits = search.base.fits(cluster.capacity)
    use = utilisation(cluster, step, encoders=False)
    outcomes = {"text_only": Outcome("text_only", step, *use, search.base, fits, {})}
    refused: dict[str, str] = {}
    taken = 0.0
    if cluster.encoders:
        inside(search, outcomes, refused)
        begin = time.perf_counter()
        beside(search, outcomes, refused)
        taken = time.perf_counter() - begin
    name, reason = recommend(cluster, outcomes, refused)
    constants = {
        **search.times.constants(),
        "dp_all_gather_s": search.backbone.all_gather,
        "dp_reduce_scatter_s": search.backbone.reduce_scatter,
    }
    return Answer(
        cluster,
        search.llm,
        outcomes,
        refused,
        name,
        reason,
        constants,
        taken,
        orders(cluster, search.plan),
    )


def recommend(
    cluster: Cluster, outcomes: Mapping[str, Outcome], refused: Mapping[str, str]
) -> tuple[str, str]:
    """The method to use, and why. Raises UserError, naming bytes, if none fits in memory."""
    able = [o for o in outcomes.values() if o.fits and o.method != "text_only"]
    if not cluster.encoders:
        return "text_only", "there is no encoder"
    if not able:
        lines = [f"{o.method} {o.memory.explain(cluster.capacity)}" for o in outcomes.values()]
        lines += [f"{name} {why}" for name, why in refused.items()]
        raise UserError("\n  ".join(["no method fits in memory:", *lines]))
    able = [o for o in able if o.method not in _NOT_RUN] or able
    best = min(able, key=lambda o: o.step)
    simple = outcomes.get("phased")
    if simple and simple.fits and simple.step <= best.step * (1 + _PAYS):
        gain = simple.step / best.step - 1
        return "phased", f"filling would gain {gain:.1%} over it, which is not worth its cost"
    others = [o for o in able if o.method != best.method]
    if not others:
        return best.method, "no other method fits in memory"
    second = min(others, key=lambda o: o.step)
    return best.method, f"{second.step / best.step:.3f} x as fast as {second.method}, the next"
