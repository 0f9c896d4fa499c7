"""What `verify` runs: plans and the methods on each, by name."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator

from optimus_jax.runtime.small_plan import SmallPlan, Tower
from optimus_jax.schedule.methods import ON_ANY_PIPELINE
from optimus_jax.schedule.pipeline import ORDERS

DEVICES = 8
# Largest relative errors of loss and gradients. bfloat16 has 8 bits: two orders of summation of the
# sequential model itself differ by as much.
BOUNDS = {"float32": (1e-6, 1e-5), "bfloat16": (2e-2, 1e-1)}
INJECTIONS = ("drop_microbatch", "swap_slots", "skip_reduce")  # faults that `verify` can put in
DRAWN, SEED = 64, 0
SUITE = (1, 9, 18, 38, 42, 46, 50, 62)  # of the drawn ones, what the tests run each time
# Figure 5 of Optimus (arXiv 2408.03505): LLM (dp 1, pp 4, tp 2), encoder (dp 2, pp 2, tp 2)
FIGURE_5 = SmallPlan(4, 1, 1, 4, tp=2, towers=(Tower(pp=2, tp=2),), zero=True)
BALANCED = (
    SmallPlan(4, 1, 1, 5, tp=2, towers=(Tower(pp=4),), balanced=True),
    SmallPlan(2, 2, 2, 4, towers=(Tower(pp=2, layers=3),), balanced=True, zero=True),
    SmallPlan(3, 1, 2, 3, tp=2, towers=(Tower(pp=3, tp=2),), block="llama", balanced=True),
)
CAPPED = SmallPlan(2, 1, 1, 7, tp=2, towers=(Tower(),), cap=2)
BFLOAT16 = SmallPlan(2, 1, 1, 2, tp=2, towers=(Tower(tp=2),), dtype="bfloat16")


@dataclasses.dataclass(frozen=True)
class Case:
    plan: SmallPlan
    order: str
    method: str

    def __str__(self) -> str:
        return f"{self.method}/{self.order} {self.plan}"


def grid_plans() -> Iterator[SmallPlan]:
    """pp 1, 2, 4 x dp 1, 2 x V 1, 2 x M in {1, pp - 1, pp, 2 pp + 1}, where legal; every device
    holds a whole encoder."""
    for pp in (1, 2, 4):
        for dp in (1, 2):
            for chunks in (1, 2):
                for microbatches in sorted({1, pp - 1, pp, 2 * pp + 1} - {0}):
                    if chunks == 1 or microbatches % pp == 0:
                        yield SmallPlan(pp, dp, chunks, microbatches)


def drawn_plans(count: int = DRAWN, seed: int = SEED) -> list[SmallPlan]:
    """Plans drawn from all sizes, models and policies; the same for the same seed."""
    chance, found = random.Random(seed), {}
    while len(found) < count:
        plan = _draw(chance)
        if plan is not None:
            found[plan] = None
    return list(found)


def _draw(chance: random.Random) -> SmallPlan | None:
    pp, tp, dp = chance.choice((1, 2, 3, 4)), chance.choice((1, 2, 2, 4)), chance.choice((1, 2))
    chunks = chance.choice((1, 1, 2, 3))
    if pp * tp * dp > DEVICES or pp * chunks > 8:
        return None
    microbatches = pp * chance.choice((1, 3) if pp < 3 else (1,))
    if chunks == 1:
        microbatches = chance.choice((1, 3, 5) if pp < 3 else (3, 5))
    policies, towers = ("full", "selective", "none"), []
    for kind in chance.choice((("image",), ("image",), ("image", "audio"), ("image", "image"))):
        own_pp = chance.choice([n for n in (1, 2, 3, 4) if pp % n == 0])
        own_tp = chance.choice([n for n in (1, 2, 4) if tp % n == 0])
        block = chance.choice(("vit", "vit22b"))
        towers.append(Tower(kind, block, own_pp, own_tp, 4, chance.choice(policies)))
    sizes = sorted({t.pp for t in towers}), sorted({t.tp for t in towers})
    if any(b % a for ordered in sizes for a, b in itertools.pairwise(ordered)):
        return None  # no grid refines them all
    return SmallPlan(
        pp,
        dp,
        chunks,
        microbatches,
        tp,
        tuple(towers),
        block=chance.choice(("gpt", "llama", "vit22b")),
        recompute=chance.choice(policies),
        sequence=chance.random() < 0.75,
        zero=chance.random() < 0.5,
        fuse=tp > 1 and chance.random() < 0.4,
    )


def grid_cases(plan: SmallPlan) -> list[Case]:
    """Every method on every order that the plan's chunks allow."""
    orders = [name for name in ORDERS if plan.chunks == 1 or name == "1f1b"]
    return [Case(plan, order, method) for order in orders for method in ON_ANY_PIPELINE]


def drawn_cases(plan: SmallPlan) -> list[Case]:
    """Three methods for each drawn plan; for balanced and capped ones the one they are made for."""
    methods = ("encoder_first", "phased", "filled")
    if plan.balanced:
        methods = ("balanced",)
    elif plan.cap:
        methods = ("filled",)
    return [Case(plan, "1f1b", method) for method in methods]


def all_cases() -> Iterator[list[Case]]:
    """The cases of each plan, which share a compilation."""
    for plan in grid_plans():
        yield grid_cases(plan)
    for plan in (FIGURE_5, *BALANCED, CAPPED, BFLOAT16, *drawn_plans()):
        yield drawn_cases(plan)
