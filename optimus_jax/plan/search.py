"""The search over encoder plans: which there are, what they hold, and which is best."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence

from optimus_jax.cost.memory import MemoryTable
from optimus_jax.fill.encoder import EncoderPlan
from optimus_jax.fill.filling import Filling, least_step, time_bounds
from optimus_jax.fill.windows import SlotRule
from optimus_jax.plan.candidates import LlmTimeline, best_llm_plan, encoder_plans
from optimus_jax.plan.cluster import Cluster
from optimus_jax.plan.device_memory import llm_memory, with_encoders
from optimus_jax.plan.outcome import Outcome
from optimus_jax.plan.times import Times
from optimus_jax.plan.utilisation import utilisation

_MOST_COMBINATIONS = 64
_PATIENCE = 12  # combinations tried without a shorter step
THOROUGH = 4  # of many combinations, so many are packed with all their spreads

Method = Callable[[list[EncoderPlan]], Filling | None]


class Search:
    """One cluster with its LLM's plan and timeline."""

    def __init__(self, cluster: Cluster, llm: LlmTimeline | None = None):
        self.cluster = cluster
        self.llm = llm or best_llm_plan(cluster)
        self.plan, self.backbone = self.llm.plan, self.llm.backbone
        self.times = Times(cluster, self.plan)
        a = cluster.assume
        self.rule = SlotRule(True, a.slot_usable, a.slot_contention)
        self.base = llm_memory(cluster, self.plan)

    @functools.cached_property
    def whole(self) -> list[dict[str, EncoderPlan]]:
        """Plans of all encoders together with whole kernels, the least memory first."""
        return self._combinations(None)

    @functools.cached_property
    def cut(self) -> list[dict[str, EncoderPlan]]:
        """The same with kernels cut to fit into the shortest tensor-parallel slot."""
        slots = [e - s for row in self.backbone.slots for s, e in row]
        return self._combinations(min(slots) / self.rule.contention if slots else None)

    def _combinations(self, longest: float | None) -> list[dict[str, EncoderPlan]]:
        each = [
            encoder_plans(self.cluster, self.plan, spec, longest)
            for spec in self.cluster.encoders.values()
        ]
        found = [
            dict(zip(self.cluster.encoders, chosen, strict=True))
            for chosen in itertools.product(*each)
        ]
        found.sort(key=self.states)
        return found[:_MOST_COMBINATIONS]

    def states(self, plans: Mapping[str, EncoderPlan]) -> float:
        """Bytes of a device without any encoder activations."""
        return with_encoders(self.base, self.cluster, self.plan, plans, [0.0] * len(plans)).total

    def memory(self, plans: Mapping[str, EncoderPlan], held: Sequence[float]) -> MemoryTable:
        """Bytes of a device if every pipeline of an encoder holds `held` microbatches."""
        return with_encoders(self.base, self.cluster, self.plan, plans, held)

    def best(
        self,
        method: Method,
        combinations: Sequence[dict[str, EncoderPlan]],
        states_only: bool,
    ) -> tuple[Filling, dict[str, EncoderPlan]] | None:
        """The combination with the shortest step, of those the first. Without encoder activations
        in the count (`states_only`), as the paper prunes."""
        best: tuple[Filling, dict[str, EncoderPlan]] | None = None
        in_vain = 0
        for plans in combinations:
            if best and in_vain == _PATIENCE:
                break
            every = list(plans.values())
            if self.states(plans) > self.cluster.capacity:
                continue
            if best and least_step(self.backbone, every, True) >= best[0].step - 1e-9:
                continue
            found, in_vain = method(every), in_vain + 1
            if found is None or (best and found.step >= best[0].step - 1e-9):
                continue
            fits = states_only or self.memory(plans, found.in_flight()).fits(self.cluster.capacity)
            if fits:
                best, in_vain = (found, plans), 0
        return best

    def shortest(
        self,
        method: Method,
        combinations: Sequence[dict[str, EncoderPlan]],
    ) -> list[dict[str, EncoderPlan]]:
        """The few combinations under which a method takes least time; all if it takes none."""
        steps = []
        for k, plans in enumerate(combinations):
            if self.states(plans) <= self.cluster.capacity:
                found = method(list(plans.values()))
                if found is not None:
                    steps.append((round(found.step, 9), k))
        best = [combinations[k] for _, k in sorted(steps)[:THOROUGH]]
        return best or list(combinations)

    def outcome(
        self,
        filling: Filling,
        plans: Mapping[str, EncoderPlan],
        without_tp: float | None = None,
    ) -> Outcome:
        """A filling with what the reports say of it."""
        table = self.memory(plans, filling.in_flight())
        return Outcome(
            filling.method,
            filling.step,
            *utilisation(self.cluster, filling.step),
            table,
            table.fits(self.cluster.capacity),
            plans,
            filling.inside_share,
            # beside the LLM's own order, which filled_zb leaves, so not filling.time_share
            1 - (filling.step - self.backbone.step) / filling.encoder_seconds,
            time_bounds(filling.backbone, list(plans.values())),
            without_tp,
            filling,
        )

    def no_room(self, plans: Mapping[str, EncoderPlan]) -> str:
        """Why nothing fits, in words, at the plan with least memory, and what would."""
        cluster, most = self.cluster, [float(self.backbone.microbatches)] * len(plans)
        llm = dataclasses.replace(cluster.llm, recompute="full")
        encoders = {
            name: dataclasses.replace(spec, recompute="full")
            for name, spec in cluster.encoders.items()
        }
        leaner = dataclasses.replace(cluster, llm=llm)
        base = llm_memory(leaner, self.plan)
        changes = {
            "1 encoder microbatch in flight": self.memory(plans, [1.0] * len(plans)),
            "full recompute of the LLM": with_encoders(base, leaner, self.plan, plans, most),
            "full recompute of the encoders": with_encoders(
                self.base,
                dataclasses.replace(cluster, encoders=encoders),
                self.plan,
                plans,
                most,
            ),
        }
        return self.memory(plans, most).explain(cluster.capacity, changes)
