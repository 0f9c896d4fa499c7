"""Whole plans against the sequential model: a dozen here, all of them in `verify`."""

from __future__ import annotations

import collections

import pytest

from optimus_jax.runtime.comparison import compare, grid_of
from optimus_jax.runtime.small_plan import SmallPlan
from optimus_jax.schedule.methods import ON_ANY_PIPELINE
from optimus_jax.verified import (
    BALANCED,
    BFLOAT16,
    BOUNDS,
    CAPPED,
    FIGURE_5,
    SUITE,
    all_cases,
    drawn_cases,
    drawn_plans,
)

PLANS = (FIGURE_5, BALANCED[2], CAPPED, BFLOAT16, *(drawn_plans()[n] for n in SUITE))


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_loss_and_gradients_equal_the_sequential_model(plan: SmallPlan) -> None:
    cases = drawn_cases(plan)
    loss, gradient = BOUNDS[plan.dtype]
    errors = compare(plan, [(case.order, case.method) for case in cases])
    for case, found in zip(cases, errors, strict=True):
        assert found[0] <= loss and found[1] <= gradient, f"{case}: {found}"


def test_figure_5_is_the_papers() -> None:
    grid = grid_of(FIGURE_5)
    assert (grid.dp, grid.pp, grid.tp) == (1, 4, 2)
    replicas = grid.extent(grid.replicas_of(0))
    assert (replicas, grid.encoders[0].pp, grid.encoders[0].tp) == (2, 2, 2)


def test_a_dozen_are_in_the_suite_and_they_have_everything() -> None:
    assert len(PLANS) >= 12 and _kinds(PLANS) == _kinds(drawn_plans()) | {"balanced", "cap"}


def test_sixty_plans_and_every_size_are_drawn() -> None:
    plans = drawn_plans()
    assert len(set(plans)) == len(plans) >= 60
    assert plans == drawn_plans()  # the same each time
    seen: dict[str, set[object]] = collections.defaultdict(set)
    for plan in plans:
        for name in ("pp", "tp", "dp", "chunks", "block", "recompute", "zero", "fuse", "sequence"):
            seen[name].add(getattr(plan, name))
        seen["towers"].add(len(plan.towers))
        seen["odd"].add(plan.microbatches % 2)
        for tower in plan.towers:
            seen["encoder pp"].add(tower.pp)
            seen["encoder tp"].add(tower.tp)
            seen["input"].add(tower.input)
    assert seen["pp"] == {1, 2, 3, 4} and seen["tp"] == {1, 2, 4} and seen["dp"] == {1, 2}
    assert seen["chunks"] == {1, 2, 3} and seen["block"] == {"gpt", "llama", "vit22b"}
    assert seen["recompute"] == {"full", "selective", "none"} and seen["towers"] == {1, 2}
    assert seen["encoder pp"] >= {1, 2, 4} and seen["encoder tp"] == {1, 2, 4}
    assert seen["input"] == {"image", "audio"} and 1 in seen["odd"]
    assert seen["zero"] == seen["fuse"] == seen["sequence"] == {False, True}


def test_every_method_is_among_the_cases() -> None:
    cases = [case for cases in all_cases() for case in cases]
    assert {case.method for case in cases} == {*ON_ANY_PIPELINE, "balanced"}
    names = [str(case) for case in cases]
    assert len(names) == len(set(names)) >= 350


def _kinds(plans: tuple[SmallPlan, ...] | list[SmallPlan]) -> set[str]:
    """What is special about some of the plans, in words."""
    found = set()
    for plan in plans:
        found |= {plan.block, plan.recompute, f"pp{plan.pp}", f"tp{plan.tp}"}
        found |= {name for name in ("zero", "fuse", "balanced", "cap") if getattr(plan, name)}
        found |= {f"V{plan.chunks}", f"{len(plan.towers)} towers", f"sequence {plan.sequence}"}
        found |= {part for t in plan.towers for part in (t.input, t.block, f"encoder pp{t.pp}")}
    return found
