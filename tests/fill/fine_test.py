"""fine at kernel resolution: by hand, never longer than coarse, and known lengths."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings

from optimus_jax.fill.backbone import ChunkPass, backbone
from optimus_jax.fill.coarse import coarse
from optimus_jax.fill.encoder import EncoderPlan
from optimus_jax.fill.filling import Filling
from optimus_jax.fill.fine import fine
from optimus_jax.fill.windows import SlotRule
from optimus_jax.schedule.action_orders import one_f_one_b
from tests.fill import papers_size
from tests.fill.papers_size import SLOT, vit
from tests.fill.random_fillings import Case, by_hand, cases, kernels


def spans(filling: Filling, kind: str) -> dict[int, tuple[float, float]]:
    packed = dict(filling.placed[0].directions)[kind]
    return {p.microbatch: p.spans[0] for p in packed.parts}


def test_a_backward_moves_into_the_gap_where_it_fits() -> None:
    """EB0 into the gap from 6 to 7 of rank 0; EB1 has nowhere to go."""
    plan = EncoderPlan(2, 1, 1, kernels(0.5, 2), kernels(0.5, 2))
    found = fine(by_hand(), [plan], SlotRule())
    assert spans(coarse(by_hand(), [plan]), "EB") == {0: (9.0, 10.0), 1: (9.0, 10.0)}
    assert spans(found, "EB") == {0: (6.0, 7.0), 1: (9.0, 10.0)}
    assert found.step == 9 + 1 + 1


def test_one_that_does_not_fit_ends_the_moves() -> None:
    plan = EncoderPlan(2, 1, 1, kernels(0.5, 2), kernels(1.0, 2))
    found = fine(by_hand(), [plan], SlotRule())
    assert spans(found, "EB") == {0: (9.0, 11.0), 1: (9.0, 11.0)}


def test_a_forward_moves_into_slots_before_its_deadline() -> None:
    """One rank, F of 1 and a slot of 0.5, B twice that. A forward's kernel just fits a slot: those
    of EF1, needed at 4.5, lie in the slots of B0, those of EF2, needed at 9, in the slots of B1."""
    passes = {
        "F": [ChunkPass(((1.0, False), (0.5, True)))],
        "B": [ChunkPass(((1.0, False), (0.5, True)) * 2)],
    }
    line = backbone(one_f_one_b(1, 3), (0,), passes)
    assert line.need == (0.0, 4.5, 9.0)
    plan = EncoderPlan(1, 1, 1, kernels(0.75, 2, compute=0.5), kernels(1.0, 1))
    assert spans(coarse(line, [plan]), "EF") == {0: (-4.5, -3.0), 1: (-3.0, -1.5), 2: (-1.5, 0.0)}
    found = fine(line, [plan], SlotRule())
    assert spans(found, "EF") == {0: (-1.5, 0.0), 1: (2.5, 4.5), 2: (7.0, 9.0)}
    gathered = dataclasses.replace(line, all_gather=4.5)
    assert spans(fine(gathered, [plan], SlotRule()), "EF")[2] == (-1.5, 0.0), "nothing sticks out"
    # a backward's kernel fits no slot
    assert spans(found, "EB") == {0: (13.5, 14.5), 1: (14.5, 15.5), 2: (15.5, 16.5)}
    assert fine(line, [plan], SlotRule(use=False)).step == coarse(line, [plan]).step
    assert fine(line, [plan], SlotRule(contention=1.1)).step == coarse(line, [plan]).step


@settings(max_examples=100, deadline=None)
@given(cases(most_encoders=1))
def test_never_longer_than_coarse(case: Case) -> None:
    start = coarse(case.backbone, case.plans)
    found = fine(case.backbone, case.plans, case.rule)
    assert found.step <= start.step + 1e-9
    for one, before in zip(found.placed, start.placed, strict=True):
        assert one.forward.owners() == before.forward.owners()


@pytest.mark.parametrize(
    ("microbatches", "coarse_step", "step", "cut_step"),
    [(32, 10.04, 9.85, 9.56), (24, 7.57, 7.45, 7.25), (16, 5.10, 5.05, 4.95)],
)
def test_lengths_of_an_earlier_simulation(
    microbatches: int, coarse_step: float, step: float, cut_step: float
) -> None:
    """Whole backward kernels fit no slot of 300 us, cut ones do."""
    line = papers_size.line(microbatches, 0.044, 0.102, 0.295, 1e-3)
    rule = SlotRule()
    assert coarse(line, [vit()]).step == pytest.approx(coarse_step, rel=2e-3)
    assert fine(line, [vit()], rule).step == pytest.approx(step, rel=3e-3)
    assert fine(line, [vit(cut=SLOT)], rule).step == pytest.approx(cut_step, rel=1e-3)
