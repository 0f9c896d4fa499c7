"""Methods that run encoders beside the LLM, on parallel plans of their own, on a cluster."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable

from optimus_jax.cost.memory import MemoryTable
from optimus_jax.fill.backbone import Backbone
from optimus_jax.fill.coarse import coarse
from optimus_jax.fill.encoder import EncoderPlan
from optimus_jax.fill.filled import filled
from optimus_jax.fill.filling import Filling
from optimus_jax.fill.fine import fine
from optimus_jax.fill.windows import SlotRule
from optimus_jax.plan.candidates import can_spread, zero_bubble_timeline
from optimus_jax.plan.outcome import Outcome
from optimus_jax.plan.search import THOROUGH, Search
from optimus_jax.plan.utilisation import utilisation


def beside(search: Search, outcomes: dict[str, Outcome], refused: dict[str, str]) -> None:
    """Methods that run the encoder beside the LLM, on plans of its own."""
    backbone = search.backbone
    _phased(search, outcomes, refused)
    found = fine_plans(search)
    if found is None:
        refused["coarse"] = refused["fine"] = search.no_room(search.whole[0])
    else:
        plans = list(found[1].values())
        # the first phase of fine, so on its plans
        outcomes["coarse"] = search.outcome(coarse(backbone, plans), found[1])
        without = fine(backbone, plans, SlotRule(use=False))
        outcomes["fine"] = search.outcome(*found, without.step)
    _filled(search, outcomes, refused)


def _phased(search: Search, outcomes: dict[str, Outcome], refused: dict[str, str]) -> None:
    """Decoupled plans without filling: all forwards before the LLM's step, all backwards after
    it, each encoder pipeline filling and draining on its own; the plan that takes least time of
    those that fit."""
    backbone, n = search.backbone, search.backbone.microbatches
    found: list[tuple[float, dict[str, EncoderPlan], MemoryTable]] = []
    for plans in search.whole:
        held = [math.ceil(n / plan.pipelines) for plan in plans.values()]
        table = search.memory(plans, held)
        if table.fits(search.cluster.capacity):
            work = sum(phased_seconds(n, plans.values()))
            found.append((work, plans, table))
    if not found:
        refused["phased"] = search.no_room(search.whole[0])
        return
    work, plans, table = min(found, key=lambda f: f[0])
    step = backbone.step + work
    outcomes["phased"] = Outcome(
        "phased", step, *utilisation(search.cluster, step), table, True, plans, 0.0, 0.0
    )


def phased_seconds(microbatches: int, plans: Iterable[EncoderPlan]) -> tuple[float, float]:
    """Seconds of all encoders' forwards before the LLM's step and of their backwards after it: each
    pipeline takes its share of the microbatches through its stages, filling and draining."""
    forward = backward = 0.0
    for plan in plans:
        turns = math.ceil(microbatches / plan.pipelines) + plan.stages - 1
        forward += turns * plan.forward.seconds / plan.stages
        backward += turns * plan.backward.seconds / plan.stages if plan.backward else 0.0
    return forward, backward


def _filled(search: Search, outcomes: dict[str, Outcome], refused: dict[str, str]) -> None:
    def packing(
        backbone: Backbone, rule: SlotRule, quick: bool = False
    ) -> Callable[[list[EncoderPlan]], Filling | None]:
        def pack(plans: list[EncoderPlan]) -> Filling | None:
            named = dict(zip(search.cluster.encoders, plans, strict=True))

            def accept(filling: Filling) -> bool:
                caps = [spec.in_flight for spec in search.cluster.encoders.values()]
                held = filling.in_flight()
                if any(c and h > c + 1e-9 for c, h in zip(caps, held, strict=True)):
                    return False
                return search.memory(named, held).fits(search.cluster.capacity)

            spread = can_spread(search.cluster, named)
            return filled(backbone, plans, rule, spread, accept, quick)

        return pack

    every = search.cut
    if len(every) > THOROUGH:
        quick = packing(search.backbone, search.rule, True)
        every = search.shortest(quick, every)
    found = search.best(packing(search.backbone, search.rule), every, False)
    if found is None:
        refused["filled"] = search.no_room(search.cut[0])
        return
    plans = found[1]
    without = packing(search.backbone, SlotRule(use=False))(list(plans.values()))
    outcomes["filled"] = search.outcome(*found, without.step if without else None)
    try:
        split = zero_bubble_timeline(search.cluster, search.plan)
    except ValueError as error:
        refused["filled_zb"] = str(error)
        return
    zero = packing(split, search.rule)(list(plans.values()))
    if zero is None:
        refused["filled_zb"] = "no packing beside split backwards fits in memory"
        return
    less = packing(split, SlotRule(use=False))(list(plans.values()))
    outcomes["filled_zb"] = search.outcome(
        dataclasses.replace(zero, method="filled_zb"), plans, less.step if less else None
    )


def fine_plans(search: Search) -> tuple[Filling, dict[str, EncoderPlan]] | None:
    """fine with its best plans; as the paper, memory counts without encoder activations."""
    return search.best(lambda plans: fine(search.backbone, plans, search.rule), search.whole, True)
