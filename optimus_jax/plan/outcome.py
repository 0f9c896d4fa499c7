"""What the planner finds: one method's outcome, and the answer with all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from optimus_jax.cost.memory import MemoryTable
from optimus_jax.fill.baselines import Baseline
from optimus_jax.fill.encoder import EncoderPlan
from optimus_jax.fill.filling import Filling
from optimus_jax.plan.candidates import LlmTimeline
from optimus_jax.plan.cluster import Cluster
from optimus_jax.plan.orders import OrderOutcome


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
    schedules of the encoders took, `refused` says in words why a method is absent, `orders` is the
    LLM alone under every pipeline order."""

    cluster: Cluster
    llm: LlmTimeline
    outcomes: dict[str, Outcome]
    refused: dict[str, str]
    recommended: str
    reason: str
    constants: Mapping[str, float]
    scheduling_s: float
    orders: Mapping[str, OrderOutcome]
