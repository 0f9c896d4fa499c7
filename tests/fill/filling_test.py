"""What a filling takes and hides, worked out by hand."""

from __future__ import annotations

import pytest

from optimus_jax.fill.backbone import Backbone, backbone
from optimus_jax.fill.coarse import coarse
from optimus_jax.fill.encoder import EncoderPlan
from optimus_jax.fill.filled import filled
from optimus_jax.fill.filling import Filling, encoder_seconds, time_bounds
from optimus_jax.fill.packing import Packed, Part, Placed
from optimus_jax.fill.windows import SlotRule
from optimus_jax.schedule.action_orders import one_f_one_b
from optimus_jax.schedule.zero_bubble import zb_h1
from tests.fill.random_fillings import by_hand, kernels, one_kind

PLAN = EncoderPlan(2, 1, 1, kernels(0.5, 2, pipelines=2), kernels(1.0, 2, pipelines=2))


def packed(*parts: tuple[int, int, float, float], unit: bool = False) -> Packed:
    made = tuple(Part(i, j, unit, ((s, e),)) for i, j, s, e in parts)
    return Packed(made, made[-1].spans[0][1])


def example(line: Backbone) -> Filling:
    """EF0 and EF1 at their deadlines 0 and 1; EB0 from 6 to 7 and after 9, EB1 after 9."""
    forward = packed((0, 0, -1.0, 0.0), (1, 1, 0.0, 1.0))
    backward = packed((0, 0, 6.0, 10.0), (1, 1, 9.0, 11.0))
    return Filling("by hand", line, SlotRule(), (Placed(PLAN, forward, backward),))


def test_by_hand() -> None:
    found = example(by_hand())
    assert (found.delay, found.tail, found.step) == (1.0, 2.0, 12.0)
    assert found.encoder_seconds == 3.0
    assert found.time_share == 0.0
    # of 6 s: EF1 and a half of EB0 inside
    assert found.inside_share == pytest.approx(2 / 6)
    assert found.in_flight() == [1.0]


def test_gathering_and_scattering_hide_what_sticks_out() -> None:
    found = example(by_hand(all_gather=0.75, reduce_scatter=1.5))
    assert (found.delay, found.tail, found.step) == (0.25, 0.5, 12.0)
    assert found.time_share == pytest.approx(1 - 0.75 / 3)
    assert found.inside_share == pytest.approx(1 - (0.25 + 0.5) / 6)
    found = example(by_hand(all_gather=2.0, reduce_scatter=3.0))
    assert (found.delay, found.tail) == (0.0, 0.0)
    assert found.time_share == found.inside_share == 1.0


def test_holes_in_a_span_are_not_work() -> None:
    """Rank 0 is busy from -2 to -1 with the first stage of another encoder, and two kernels lie
    around it."""
    line = backbone(one_f_one_b(2, 1), (0, 1), {"F": one_kind(2, 1.0), "B": one_kind(2, 2.0)})
    first = EncoderPlan(2, 2, 1, kernels(1.0, 1, 1), None)
    second = EncoderPlan(2, 1, 1, kernels(1.0, 2), None)
    found = coarse(line, [first, second])
    assert [p.spans for p in found.placed[0].forward.parts] == [((-2.0, -1.0), (-1.0, 0.0))]
    assert [p.spans for p in found.placed[1].forward.parts] == [((-3.0, 0.0),)]
    assert found.inside_share == 0.0
    assert found.delay == 3.0


def test_copies_share_the_work() -> None:
    """Two copies on each rank: 4 pipelines, each on half of its devices."""
    plan = EncoderPlan(2, 1, 2, kernels(1.0, 1), kernels(1.0, 1))
    line = by_hand()
    assert encoder_seconds(line, [plan]) == 1.0
    assert encoder_seconds(line, [plan, PLAN]) == 4.0
    found = coarse(line, [plan])
    # EF0 on rank 0 before 0, EF1 on rank 1 from 0; both backwards from 9 to 10
    assert found.inside_share == pytest.approx(1 - 3 / 4)


def test_a_filling_without_encoders_is_the_llm_alone() -> None:
    for found in (coarse(by_hand(), []), filled(by_hand(), [], SlotRule())):
        assert found is not None
        assert (found.step, found.time_share, found.inside_share) == (9.0, 1.0, 1.0)
        assert found.in_flight() == []
    assert time_bounds(by_hand(), []) == (1.0, 1.0)


def test_in_flight_by_hand() -> None:
    """Pipeline 0 holds microbatches 0 and 1 from -1 to 12; 2 comes when 0 is gone."""
    forward = packed((0, 0, -2.0, -1.0), (1, 0, -1.0, 0.0), (2, 0, 12.0, 13.0))
    backward = packed((0, 0, 11.0, 12.0), (1, 0, 13.0, 14.0), (2, 0, 14.0, 15.0))
    placed = Placed(PLAN, forward, backward)
    frozen = Placed(PLAN, forward, None)
    assert Filling("", by_hand(), SlotRule(), (placed, frozen)).in_flight() == [2.0, 0.0]
    units = Placed(
        PLAN,
        packed((0, 0, -2.0, -1.0), (0, 1, -2.0, -1.0), unit=True),
        packed((0, 0, 9.0, 10.0), (0, 1, 9.0, 10.0), unit=True),
    )
    assert Filling("", by_hand(), SlotRule(), (units,)).in_flight() == [0.5]


def test_time_bounds_by_hand() -> None:
    """Of E = 3 s a forward of 1 and a backward of 2 stick out, or the halves of both."""
    assert time_bounds(by_hand(), [PLAN]) == (0.0, 0.5)
    assert time_bounds(by_hand(0.75, 0.5), [PLAN]) == (
        pytest.approx(1 - (0.25 + 1.5) / 3),
        pytest.approx(1 - 0.5 / 3),
    )
    frozen = EncoderPlan(2, 1, 1, PLAN.forward, None)
    crossing = EncoderPlan(2, 1, 1, PLAN.forward, None, True)
    assert time_bounds(by_hand(), [frozen]) == (0.0, 0.5)
    assert time_bounds(by_hand(), [crossing]) == (1.0, 1.0)
    assert time_bounds(by_hand(), [PLAN, crossing]) == (pytest.approx(1 - 3 / 4), 1 - 1.5 / 4)


def test_weight_gradients_hide_the_last_backward() -> None:
    """The last gradient is there 1 s before the LLM ends, and EB1 takes 1 s."""
    line = backbone(zb_h1(2, 2), (0, 1), {kind: one_kind(2, 1.0) for kind in "FIW"})
    plan = EncoderPlan(2, 1, 1, kernels(0.25, 1), kernels(1.0, 1))
    assert line.end - line.given[-1] == 1.0
    whole, _ = time_bounds(line, [plan])
    assert whole == pytest.approx(1 - 0.25 / 1.25)


@pytest.mark.parametrize("microbatches", [1, 5])
def test_a_crossing_forward_delays_nothing(microbatches: int) -> None:
    """All in the step before or in gaps: the step is the LLM's own as long as the work fits."""
    line = backbone(
        one_f_one_b(2, microbatches), (0, 1), {"F": one_kind(2, 1.0), "B": one_kind(2, 2.0)}
    )
    plan = EncoderPlan(2, 1, 1, kernels(0.25, 1), None, True)
    found = filled(line, [plan], SlotRule())
    assert found is not None
    assert found.placed[0].crosses
    assert (found.delay, found.step, found.inside_share) == (0.0, line.step, 1.0)
