"""filled at kernel resolution: by hand, against the other methods, and what no packing beats."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimus_jax.fill.backbone import backbone
from optimus_jax.fill.coarse import coarse
from optimus_jax.fill.encoder import EncoderPlan
from optimus_jax.fill.filled import filled
from optimus_jax.fill.filling import Filling, encoder_seconds, time_bounds
from optimus_jax.fill.fine import fine
from optimus_jax.fill.windows import SlotRule
from optimus_jax.schedule.action_orders import one_f_one_b
from tests.fill import papers_size
from tests.fill.papers_size import SLOT, vit
from tests.fill.random_fillings import Case, by_hand, cases, kernels, one_kind

PLAN = EncoderPlan(2, 1, 1, kernels(0.5, 2, pipelines=2), kernels(1.0, 2, pipelines=2))


def test_units_of_the_first_and_the_last_microbatch_by_hand() -> None:
    """Whole ones stick out by 1 and 2. EB1 in halves on both ranks sticks out by 1; the forwards by
    1 all the same, since halves of both are rank 0's, which has no idle time between them."""
    whole = filled(by_hand(), [PLAN], SlotRule(), spread=False)
    spread = filled(by_hand(), [PLAN], SlotRule())
    assert whole is not None and spread is not None
    assert (whole.delay, whole.tail) == (1.0, 2.0)
    assert (spread.delay, spread.tail) == (1.0, 1.0)
    assert [p.microbatch for p in spread.placed[0].forward.parts if p.unit] == [1, 1]


def test_pipelines_that_suit_the_backwards() -> None:
    """Where a third of the slots can be used: 0.66 with the pipelines that suit late forwards."""
    line = papers_size.line(16, 0.044, 0.102, 0.295, 1e-3)
    found = filled(line, [vit(cut=SLOT)], SlotRule(usable=1 / 3), spread=False)
    assert found is not None
    assert found.time_share >= 0.92


def test_what_fine_does_better() -> None:
    """Each rank keeps two microbatches and only EF2 moves into rank 0's gap. Pipelines that suit
    late forwards or early backwards have three on one rank, and then a delay or a tail."""
    line = backbone(one_f_one_b(2, 4), (0, 1), {"F": one_kind(2, 0.5), "B": one_kind(2, 3.0)})
    plan = EncoderPlan(2, 1, 1, kernels(1.5, 1, pipelines=2), kernels(2.5, 1, pipelines=2))
    found = filled(line, [plan], SlotRule(), spread=False)
    assert found is not None
    assert found.method == "filled"
    assert found.step == fine(line, [plan], SlotRule()).step == 25.0


def least_steps(case: Case, plans: list[EncoderPlan]) -> tuple[float, float]:
    """Whole and spread, from the bounds; and from the time of all devices, which must hold passes
    and encoder work."""
    line = case.backbone
    total = encoder_seconds(line, plans)
    each = []
    for plan in plans:
        for work in (plan.forward, plan.backward):
            if work is not None:
                kernel = work.whole
                slot = kernel.compute * case.rule.contention
                share = min(kernel.full, slot) if case.rule.use else kernel.full
                each.append(sum(work.counts) * share / plan.copies)
    slots = sum(e - s for row in line.slots for s, e in row) if case.rule.use else 0.0
    passes = sum(e - s for row in line.passes for s, e, _ in row)
    full = (passes - slots + line.microbatches * sum(each)) / line.ranks
    whole, spread = (line.step + (1 - b) * total for b in time_bounds(line, plans))
    return max(full, whole, line.step), max(full, spread, line.step)


@settings(max_examples=80, deadline=None)
@given(cases() | cases(frozen=st.just(False)) | cases(split=True))
def test_between_the_least_possible_and_fine(case: Case) -> None:
    line, plans, rule = case.backbone, case.plans, case.rule
    start, moved = coarse(line, plans), fine(line, plans, rule)
    whole, spread = filled(line, plans, rule, spread=False), filled(line, plans, rule)
    assert whole is not None and spread is not None
    assert spread.step - 1e-9 <= whole.step <= moved.step + 1e-9
    least = least_steps(case, plans)
    assert min(start.step, moved.step, whole.step) >= least[0] - 1e-6
    assert spread.step >= least[1] - 1e-6
    cut = filled(line, case.cut, rule)
    assert cut is not None
    assert cut.step >= least_steps(case, case.cut)[1] - 1e-6


@pytest.mark.parametrize(
    ("microbatches", "gather", "scatter", "share"),
    [
        (32, 0.044, 0.102, 96.4),
        (24, 0.044, 0.102, 95.2),
        (16, 0.044, 0.102, 92.8),
        (16, 0.067, 0.079, 94.7),
    ],
)
def test_the_bound_is_met_at_the_papers_size(
    microbatches: int, gather: float, scatter: float, share: float
) -> None:
    """Whole microbatches hide all but one forward and one backward, spread ones all."""
    line, plan = papers_size.line(microbatches, gather, scatter, 0.295, 1e-3), vit(cut=SLOT)
    whole = filled(line, [plan], SlotRule(), spread=False)
    spread = filled(line, [plan], SlotRule())
    assert whole is not None and spread is not None
    assert 100 * time_bounds(line, [plan])[0] == pytest.approx(share, abs=0.1)
    assert whole.time_share == pytest.approx(time_bounds(line, [plan])[0], abs=1e-3)
    assert whole.inside_share > 0.98
    assert spread.step == pytest.approx(line.step)


@pytest.mark.parametrize(("microbatches", "idle"), [(32, 0.922), (24, 0.691), (16, 0.461)])
def test_idle_time_at_the_papers_size(microbatches: int, idle: float) -> None:
    line = papers_size.line(microbatches, 0.044, 0.102, 0.295, 1e-3)
    assert line.bubbles() == pytest.approx(
        {
            "dp_all_gather": 0.044,
            "dp_reduce_scatter": 0.102,
            "pp_warmup": 0.031,
            "pp_cooldown": 0.053,
            "pp_other": 0.084,
            "tp": idle,
        },
        abs=1e-3,
    )


def test_what_may_be_is_asked_for() -> None:
    """With at most half a microbatch in flight only spread ones may be; nothing, with none."""

    def at_most(count: float) -> Filling | None:
        return filled(
            by_hand(), [PLAN], SlotRule(), accept=lambda f: max(f.in_flight()) <= count + 1e-9
        )

    few, none = at_most(1.0), at_most(0.25)
    assert few is not None and max(few.in_flight()) <= 1.0
    assert none is None


@settings(max_examples=40, deadline=None)
@given(cases())
def test_quick_looks_at_less(case: Case) -> None:
    quick = filled(case.backbone, case.plans, case.rule, quick=True)
    slow = filled(case.backbone, case.plans, case.rule)
    assert quick is not None and slow is not None
    assert quick.step >= slow.step - 1e-9
