"""Parallel plans that an LLM and its encoders may have on a cluster."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from optimus_jax.cost.memory import MemoryTable
from optimus_jax.errors import UserError
from optimus_jax.fill.backbone import Backbone, ChunkPass, backbone
from optimus_jax.fill.encoder import EncoderPlan, Work, work
from optimus_jax.fill.windows import Kernel
from optimus_jax.plan.cluster import Cluster, EncoderSpec, ParallelPlan
from optimus_jax.plan.device_memory import llm_memory, with_encoders
from optimus_jax.plan.times import Times
from optimus_jax.schedule.action_orders import (
    deferred_warmup,
    interleaved_1f1b,
    one_f_one_b,
)
from optimus_jax.schedule.actions import ActionTable
from optimus_jax.schedule.zero_bubble import interleaved_zero_bubble, zb_h1

_MOST_PASSES = 60_000  # of an LLM plan in a search; one with more is left out if another was timed


@dataclasses.dataclass(frozen=True)
class LlmTimeline:
    """An LLM plan with its timed step. `deferral_s` is what deferring forward dependency points
    would cost or did cost; `deferred` says whether it was done."""

    plan: ParallelPlan
    backbone: Backbone
    deferred: bool
    deferral_s: float


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def llm_timeline(cluster: Cluster, plan: ParallelPlan) -> LlmTimeline:
    """The LLM's step in (interleaved) 1F1B, with the warm-up counts under which the features of
    later microbatches are needed latest, if that costs nothing (Optimus, section 4.3)."""
    n = cluster.microbatches(plan)
    if plan.chunks == 1:
        return LlmTimeline(plan, timed(cluster, plan, one_f_one_b(plan.pp, n)), False, 0.0)
    usual = timed(cluster, plan, interleaved_1f1b(plan.pp, n, plan.chunks))
    counts = deferred_warmup(plan.pp, plan.chunks, n)
    later = timed(cluster, plan, interleaved_1f1b(plan.pp, n, plan.chunks, counts))
    price = later.step - usual.step
    free = price <= 1e-9
    return LlmTimeline(plan, later if free else usual, free, 0.0 if free else price)


def zero_bubble_timeline(cluster: Cluster, plan: ParallelPlan) -> Backbone:
    """The LLM's step with backwards split in two, those of the weights filling idle time (ZB-H1;
    over chunks torch's interleaved zero bubble)."""
    n = cluster.microbatches(plan)
    if plan.chunks == 1:
        return timed(cluster, plan, zb_h1(plan.pp, n))
    return timed(cluster, plan, interleaved_zero_bubble(plan.pp, n, plan.chunks))


def timed(
    cluster: Cluster, plan: ParallelPlan, table: ActionTable, ranks: Sequence[int] | None = None
) -> Backbone:
    """The step of an action table whose virtual stages are on `ranks` (None: round and round), with
    layers shared out equally."""
    times = Times(cluster, plan)
    count = plan.pp * plan.chunks
    share, more = divmod(cluster.llm.model.layers, count)
    layers = [share + (v < more) for v in range(count)]

    def passes(kind: str) -> list[ChunkPass]:
        known = {n: times.llm_pass(kind, n) for n in set(layers)}
        return [known[n] for n in layers]

    gather, scatter = times.exposed()
    return backbone(
        table,
        ranks or [v % plan.pp for v in range(count)],
        {kind: passes(kind) for kind in {a.kind for row in table for a in row}},
        all_gather=gather,
        reduce_scatter=scatter,
        latency=times.latency(),
    )


def llm_plans(cluster: Cluster) -> Iterator[ParallelPlan]:
    """LLM plans that divide devices, layers and batch; with the given parts as they are. Raises
    UserError if there is none."""
    given, model = cluster.parallel, cluster.llm.model
    found = False
    for tp in [given.tp] if given.tp else divisors(cluster.chip.node):
        if cluster.gpus % tp or model.heads % tp or model.hidden % tp:
            continue
        for pp in [given.pp] if given.pp else divisors(model.layers):
            if cluster.gpus % (tp * pp) or pp > model.layers:
                continue
            dp = cluster.gpus // (tp * pp)
            if (given.dp and dp != given.dp) or cluster.batch % (dp * given.microbatch):
                continue
            n = cluster.batch // (dp * given.microbatch)
            for chunks in [given.chunks] if given.chunks else divisors(model.layers // pp):
                if (chunks > 1 and (pp == 1 or n % pp)) or chunks * pp > model.layers:
                    continue
                found = True
                yield ParallelPlan(dp, pp, tp, chunks)
    if not found:
        raise UserError(
            f"no plan of dp x pp x tp = {cluster.gpus} devices has tp that divides"
            f" {model.heads} heads and pp that divides {model.layers} layers, with a batch of"
            f" {cluster.batch} in microbatches of {given.microbatch}"
            + (f" (given: {given})" if any((given.dp, given.pp, given.tp, given.chunks)) else "")
        )


def best_llm_plan(cluster: Cluster) -> LlmTimeline:
    """The plan whose LLM alone takes least time of those that fit in memory; where the plan is
    given, that one. Raises UserError, naming bytes, if none fits."""
    plans = list(llm_plans(cluster))
    if len(plans) == 1:
        return llm_timeline(cluster, plans[0])
    tables = {plan: _least_memory(cluster, plan) for plan in plans}
    fitting = [plan for plan in plans if tables[plan].fits(cluster.capacity)]
    if not fitting:
        near = min(plans, key=lambda plan: tables[plan].total)
        raise UserError(
            f"no plan of LLM and encoders fits; nearest is {near}, which"
            f" {tables[near].explain(cluster.capacity)}"
        )
    fitting.sort(key=lambda plan: _formula(cluster, plan))
    best: LlmTimeline | None = None
    for plan in fitting:
        if best is not None and _formula(cluster, plan) >= best.backbone.step:
            break
        if best and 2 * cluster.microbatches(plan) * plan.pp * plan.chunks > _MOST_PASSES:
            continue
        found = llm_timeline(cluster, plan)
        if best is None or found.backbone.step < best.backbone.step:
            best = found
    assert best is not None
    return best


def _least_memory(cluster: Cluster, plan: ParallelPlan) -> MemoryTable:
    """Bytes of an LLM plan with every encoder cut over as many of its devices as can be, each
    pipeline stage holding as many microbatches as it has stages after it."""
    plans = {}
    for name, spec in cluster.encoders.items():
        stages = max(d for d in divisors(plan.pp) if d <= spec.model.layers)
        model = spec.model
        tp = max(d for d in divisors(plan.tp) if not model.heads % d and not model.hidden % d)
        plans[name] = without_work(plan.pp, stages, plan.tp // tp)
    held = [min(plan.pp, cluster.microbatches(plan))] * len(plans)
    return with_encoders(llm_memory(cluster, plan), cluster, plan, plans, held)


def without_work(ranks: int, stages: int, copies: int) -> EncoderPlan:
    """A plan that only says how an encoder is cut, for its memory."""
    nothing = Work(Kernel(0.0, 0.0), (0,), Kernel(0.0, 0.0), (0,))
    return EncoderPlan(ranks, stages, copies, nothing, nothing)


def _formula(cluster: Cluster, plan: ParallelPlan) -> float:
    """Least seconds of the LLM alone: D + (N + (P - 1) / V) V (f + b), layers evenly shared."""
    times, n = Times(cluster, plan), cluster.microbatches(plan)
    layer = times.llm_layer()
    chunk = cluster.llm.model.layers / (plan.pp * plan.chunks) * (layer.forward + layer.backward)
    chunk += 2 * cluster.assume.p2p_busy_s
    return sum(times.exposed()) + (n + (plan.pp - 1) / plan.chunks) * plan.chunks * chunk


def encoder_plans(
    cluster: Cluster, plan: ParallelPlan, spec: EncoderSpec, cut: float | None
) -> list[EncoderPlan]:
    """Plans of one encoder beside an LLM plan: PP_enc divides PP_llm and TP_enc divides TP_llm
    (Optimus, section 4.1), each pipeline has a microbatch or more. Raises UserError if there is
    none."""
    times, found = Times(cluster, plan), []
    for stages, tp in itertools.product(divisors(plan.pp), divisors(plan.tp)):
        if (spec.stages and stages != spec.stages) or (spec.tp and tp != spec.tp):
            continue
        copies = plan.tp // tp
        pipelines = plan.pp // stages * copies
        model = spec.model
        if model.heads % tp or model.hidden % tp or stages > model.layers:
            continue
        if pipelines > cluster.microbatches(plan):
            continue
        forward = work(times.encoder_layer(spec, False, tp), model.layers, stages, pipelines, cut)
        backward = None
        if not spec.frozen:
            layer = times.encoder_layer(spec, True, tp)
            backward = work(layer, model.layers, stages, pipelines, cut)
        found.append(EncoderPlan(plan.pp, stages, copies, forward, backward, spec.frozen))
    if not found:
        raise UserError(
            f"no plan of encoder {spec.name} has pp among {divisors(plan.pp)} and tp among"
            f" {divisors(plan.tp)} that divides {spec.model.heads} heads, with"
            f" {cluster.microbatches(plan)} microbatches or fewer pipelines"
            + (f" (given: pp {spec.stages}, tp {spec.tp})" if spec.stages or spec.tp else "")
        )
    return found


def can_spread(cluster: Cluster, plans: Mapping[str, EncoderPlan]) -> bool:
    """Whether every encoder's images of a microbatch can be shared out equally to its pipelines."""
    for name, plan in plans.items():
        spec = cluster.encoders[name]
        images = cluster.parallel.microbatch * (spec.tokens // spec.image_tokens)
        if images % plan.pipelines:
            return False
    return True
