"""The planner's answer: every method on a cluster, with its plan, step, shares and memory."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence

from optimus_jax.cost.flops import Images, StepFlops, Text, hfu, mfu, step_flops
from optimus_jax.cost.memory import MemoryTable
from optimus_jax.errors import UserError
from optimus_jax.fill.backbone import Backbone
from optimus_jax.fill.baselines import (
    Baseline,
    Inside,
    balanced,
    encoder_first,
    encoder_first_tuned,
)
from optimus_jax.fill.coarse import coarse
from optimus_jax.fill.encoder import EncoderPlan
from optimus_jax.fill.filled import filled
from optimus_jax.fill.filling import Filling, encoder_seconds, time_bounds
from optimus_jax.fill.fine import fine
from optimus_jax.fill.windows import SlotRule
from optimus_jax.plan.candidates import (
    LlmTimeline,
    best_llm_plan,
    can_spread,
    encoder_plans,
    zero_bubble_timeline,
)
from optimus_jax.plan.cluster import Cluster
from optimus_jax.plan.device_memory import llm_memory, with_encoders
from optimus_jax.plan.times import Times, layer_flops

_MOST_COMBINATIONS = 64
_PATIENCE = 12  # combinations tried without a shorter step
_INSIDE = ("encoder_first", "encoder_first_tuned", "balanced")
_NOT_RUN = ("filled_zb",)  # simulated only: the executor runs whole backwards
_PAYS = 0.01  # filling is recommended from this gain over phased on


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """One method's best plan. `step_without_tp` is the step if tensor-parallel slots take no
    encoder work (the same where they take none); shares and bounds are None for methods that place
    no encoder work in bubbles."""

    method: str
    step: float
    mfu: float
    hfu: float
    memory: MemoryTable
    fits: bool
    plans: Mapping[str, EncoderPlan]
    inside_share: float | None = None
    time_share: float | None = None
    bounds: tuple[float, float] | None = None
    step_without_tp: float | None = None
    filling: Filling | None = None
    baseline: Baseline | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Answer:
    """All methods on one cluster, simulated. `scheduling_s` are the seconds that finding plans and
    schedules of the encoders took, `refused` says in words why a method is absent."""

    cluster: Cluster
    llm: LlmTimeline
    outcomes: dict[str, Outcome]
    refused: dict[str, str]
    recommended: str
    reason: str
    constants: Mapping[str, float]
    scheduling_s: float


class Planner:
    """Finds the answer for one cluster."""

    def __init__(self, cluster: Cluster, llm: LlmTimeline | None = None):
        self.cluster = cluster
        self.llm = llm or best_llm_plan(cluster)
        self.plan, self.backbone = self.llm.plan, self.llm.backbone
        self.times = Times(cluster, self.plan)
        a = cluster.assume
        self.rule = SlotRule(True, a.slot_usable, a.slot_contention)
        self.flops = step_flops_of(cluster)
        self.base = llm_memory(cluster, self.plan)
        slots = [e - s for row in self.backbone.slots for s, e in row[:4]]
        self.cut = min(slots) / a.slot_contention if slots else None

    def combinations(self, cut: bool) -> list[dict[str, EncoderPlan]]:
        """Plans of all encoders together, the least memory first."""
        names, length = list(self.cluster.encoders), self.cut if cut else None
        each = [
            encoder_plans(self.cluster, self.plan, self.cluster.encoders[name], length)
            for name in names
        ]
        found = [dict(zip(names, chosen, strict=True)) for chosen in itertools.product(*each)]
        found.sort(key=self._states)
        return found[:_MOST_COMBINATIONS]

    def _states(self, plans: Mapping[str, EncoderPlan]) -> float:
        return with_encoders(self.base, self.cluster, self.plan, plans, [0.0] * len(plans)).total

    def memory(self, plans: Mapping[str, EncoderPlan], held: Sequence[float]) -> MemoryTable:
        return with_encoders(self.base, self.cluster, self.plan, plans, held)

    def outcome(
        self,
        filling: Filling,
        plans: Mapping[str, EncoderPlan],
        without_tp: float | None = None,
    ) -> Outcome:
        table = self.memory(plans, filling.in_flight())
        return Outcome(
            filling.method,
            filling.step,
            *self._use(filling.step),
            table,
            table.fits(self.cluster.capacity),
            plans,
            filling.inside_share,
            1 - (filling.step - self.backbone.step) / filling.encoder_seconds,
            time_bounds(filling.backbone, list(plans.values())),
            without_tp,
            filling,
        )

    def _use(self, step: float) -> tuple[float, float]:
        gpus, chip = self.cluster.gpus, self.cluster.chip
        return mfu(self.flops, step, gpus, chip), hfu(self.flops, step, gpus, chip)

    def best(
        self,
        method: Callable[[list[EncoderPlan]], Filling | None],
        cut: bool,
        states_only: bool,
    ) -> tuple[Filling, dict[str, EncoderPlan]] | None:
        """The combination with the shortest step, of those the one with least memory. Without
        encoder activations in the count (`states_only`), as the paper prunes."""
        best: tuple[Filling, dict[str, EncoderPlan]] | None = None
        in_vain = 0
        for plans in self.combinations(cut):
            if self._states(plans) > self.cluster.capacity or (best and in_vain == _PATIENCE):
                continue
            every = list(plans.values())
            least = self.backbone.step + (1 - time_bounds(self.backbone, every)[1]) * (
                encoder_seconds(self.backbone, every)
            )
            if best and least >= best[0].step - 1e-9:
                continue
            found, in_vain = method(every), in_vain + 1
            if found is None or (best and found.step >= best[0].step - 1e-9):
                continue
            fits = states_only or self.memory(plans, found.in_flight()).fits(self.cluster.capacity)
            if fits:
                best, in_vain = (found, plans), 0
        return best

    def answer(self) -> Answer:
        outcomes: dict[str, Outcome] = {"text_only": self._alone()}
        refused: dict[str, str] = {}
        if self.cluster.encoders:
            self._inside(outcomes, refused)
        begin = time.perf_counter()
        if self.cluster.encoders:
            self._beside(outcomes, refused)
        taken = time.perf_counter() - begin
        name, reason = self._recommend(outcomes, refused)
        constants = {
            **self.times.constants(),
            "dp_all_gather_s": self.backbone.all_gather,
            "dp_reduce_scatter_s": self.backbone.reduce_scatter,
        }
        return Answer(self.cluster, self.llm, outcomes, refused, name, reason, constants, taken)

    def _alone(self) -> Outcome:
        step = self.backbone.step
        gpus, chip = self.cluster.gpus, self.cluster.chip
        alone = step_flops(_text(self.cluster))
        fits = self.base.fits(self.cluster.capacity)
        share = mfu(alone, step, gpus, chip), hfu(alone, step, gpus, chip)
        return Outcome("text_only", step, *share, self.base, fits, {})

    def tuned(self) -> Baseline:
        """encoder_first_tuned of this cluster."""
        return encoder_first_tuned(self.pipeline())

    def fine_and_coarse(self) -> tuple[Filling, Filling]:
        """fine with its best plan, and coarse with the same. Raises UserError if nothing fits."""
        found = self.best(lambda plans: fine(self.backbone, plans, self.rule), False, True)
        if found is None:
            raise UserError(self._no_room(self.combinations(False)[0]))
        return found[0], coarse(self.backbone, list(found[1].values()))

    def pipeline(self) -> Inside:
        """The pipeline that holds encoder and LLM layers."""
        cluster, plan = self.cluster, self.plan
        return Inside(
            plan.pp,
            cluster.microbatches(plan),
            tuple(
                (spec.model.layers, self.times.encoder_seconds(spec, plan.tp))
                for spec in cluster.encoders.values()
            ),
            cluster.llm.model.layers,
            self.times.llm_layer(),
            cluster.assume.p2p_busy_s,
            self.times.latency(),
            self.backbone.all_gather,
            self.backbone.reduce_scatter,
        )

    def _inside(self, outcomes: dict[str, Outcome], refused: dict[str, str]) -> None:
        """Methods that put the encoder into the LLM's pipeline."""
        cluster, plan = self.cluster, self.plan
        try:
            inside = self.pipeline()
        except UserError as error:  # an encoder that the LLM's tp does not divide
            refused.update(dict.fromkeys(_INSIDE, str(error)))
            return
        spec = next(iter(cluster.encoders.values()))
        weights = (
            layer_flops(spec.model, spec.image_tokens) * spec.tokens / spec.image_tokens,
            layer_flops(cluster.llm.model, cluster.llm.length),
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
            table = self._inside_memory(found)
            outcomes[name] = Outcome(
                name,
                found.step,
                *self._use(found.step),
                table,
                table.fits(cluster.capacity),
                {},
                baseline=found,
            )

    def _inside_memory(self, found: Baseline) -> MemoryTable:
        """On the rank that holds most: its layers of both kinds, with as many microbatches."""
        cluster, plan = self.cluster, self.plan
        tables = []
        for rank in range(plan.pp):
            layers = sum(found.llm_layers[rank :: plan.pp])
            scale = layers / (cluster.llm.model.layers / plan.pp)
            base = self.base
            llm = MemoryTable(
                llm_weights_gradients=base.llm_weights_gradients * scale,
                llm_optimiser=base.llm_optimiser * scale,
                llm_activations=base.llm_activations * scale,
                communication_buffers=base.communication_buffers,
            )
            share = sum(found.encoder_layers[rank :: plan.pp]) / sum(found.encoder_layers)
            whole = {
                name: encoder_plans(
                    cluster, plan, dataclasses.replace(spec, stages=1, tp=plan.tp), None
                )[0]
                for name, spec in cluster.encoders.items()
            }
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

    def _beside(self, outcomes: dict[str, Outcome], refused: dict[str, str]) -> None:
        """Methods that run the encoder beside the LLM, on plans of its own."""
        backbone = self.backbone
        self._phased(outcomes, refused)
        found = self.best(lambda plans: fine(backbone, plans, self.rule), False, True)
        if found is None:
            refused["coarse"] = refused["fine"] = self._no_room(self.combinations(False)[0])
        else:
            plans = list(found[1].values())
            outcomes["coarse"] = self.outcome(coarse(backbone, plans), found[1])
            without = fine(backbone, plans, SlotRule(use=False))
            outcomes["fine"] = self.outcome(*found, without.step)
        self._filled(outcomes, refused)

    def _phased(self, outcomes: dict[str, Outcome], refused: dict[str, str]) -> None:
        """Decoupled plans without filling: all forwards before the LLM's step, all backwards after
        it; the plan that does least encoder work of those that fit."""
        backbone, n = self.backbone, self.backbone.microbatches
        found: list[tuple[float, dict[str, EncoderPlan], MemoryTable]] = []
        for plans in self.combinations(False):
            held = [math.ceil(n / plan.pipelines) for plan in plans.values()]
            table = self.memory(plans, held)
            if table.fits(self.cluster.capacity):
                work = sum(
                    count * plan.seconds / plan.stages
                    for count, plan in zip(held, plans.values(), strict=True)
                )
                found.append((work, plans, table))
        if not found:
            refused["phased"] = self._no_room(self.combinations(False)[0])
            return
        work, plans, table = min(found, key=lambda f: f[0])
        step = backbone.step + work
        outcomes["phased"] = Outcome("phased", step, *self._use(step), table, True, plans, 0.0, 0.0)

    def _filled(self, outcomes: dict[str, Outcome], refused: dict[str, str]) -> None:
        def packing(backbone: Backbone, rule: SlotRule) -> Callable[..., Filling | None]:
            def pack(plans: list[EncoderPlan]) -> Filling | None:
                named = dict(zip(self.cluster.encoders, plans, strict=True))

                def accept(filling: Filling) -> bool:
                    return self.memory(named, filling.in_flight()).fits(self.cluster.capacity)

                spread = can_spread(self.cluster, named)
                return filled(backbone, plans, rule, spread, accept)

            return pack

        found = self.best(packing(self.backbone, self.rule), True, False)
        if found is None:
            refused["filled"] = self._no_room(self.combinations(True)[0])
            return
        plans = found[1]
        without = packing(self.backbone, SlotRule(use=False))(list(plans.values()))
        outcomes["filled"] = self.outcome(*found, without.step if without else None)
        try:
            split = zero_bubble_timeline(self.cluster, self.plan)
        except ValueError as error:
            refused["filled_zb"] = str(error)
            return
        zero = packing(split, self.rule)(list(plans.values()))
        if zero is None:
            refused["filled_zb"] = "no packing beside split backwards fits in memory"
            return
        less = packing(split, SlotRule(use=False))(list(plans.values()))
        outcomes["filled_zb"] = self.outcome(
            dataclasses.replace(zero, method="filled_zb"), plans, less.step if less else None
        )

    def _no_room(self, plans: Mapping[str, EncoderPlan]) -> str:
        capped = {"1 encoder microbatch in flight": self.memory(plans, [1.0] * len(plans))}
        return self.memory(plans, [self.backbone.microbatches] * len(plans)).explain(
            self.cluster.capacity, capped
        )

    def _recommend(self, outcomes: dict[str, Outcome], refused: dict[str, str]) -> tuple[str, str]:
        able = [o for o in outcomes.values() if o.fits and o.method != "text_only"]
        if not self.cluster.encoders:
            return "text_only", "there is no encoder"
        if not able:
            raise UserError(
                "no method fits in memory: "
                + "; ".join(
                    f"{o.method} {o.memory.explain(self.cluster.capacity)}"
                    for o in outcomes.values()
                )
            )
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


def _text(cluster: Cluster) -> Text:
    llm = cluster.llm
    return Text(llm.model, cluster.batch, llm.length, (), not llm.frozen, llm.recompute)


def step_flops_of(cluster: Cluster) -> StepFlops:
    """Operations of a step: MFU's and HFU's."""
    images = [
        Images(
            spec.model,
            spec.image_tokens,
            count := cluster.batch * (spec.tokens // spec.image_tokens),
            count,
            trained=not spec.frozen,
            recompute=spec.recompute,
        )
        for spec in cluster.encoders.values()
    ]
    return step_flops(_text(cluster), images)
