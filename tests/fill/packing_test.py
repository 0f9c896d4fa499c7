"""Packing on hand-drawn idle time: exact places, owners, units, and what others have taken."""

from __future__ import annotations

import pytest

from optimus_jax.fill.encoder import EncoderPlan
from optimus_jax.fill.packing import Free, Packed, Part, Taken, negated_free, pack, slices
from optimus_jax.fill.side import Rooms, Side
from optimus_jax.fill.windows import FAR, SlotRule
from tests.fill.random_fillings import by_hand, kernels

LINE = by_hand()
# idle on rank 0: before 0, 2 to 4, 6 to 7, from 9 on; on rank 1: before 1, from 7 on
ONE_STAGE = EncoderPlan(2, 1, 1, kernels(0.5, 2, pipelines=2), kernels(1.0, 2, pipelines=2))
TWO_STAGES = EncoderPlan(2, 2, 1, kernels(0.5, 1, 1), kernels(1.0, 1, 1))


def free(plan: EncoderPlan) -> Free:
    return Taken(LINE, plan.copies).free(plan)


def side(plan: EncoderPlan, forward: bool) -> Side:
    return Side(Rooms(LINE, plan, SlotRule()), forward)


def places(packed: Packed | None) -> list[tuple[int, int, tuple[tuple[float, float], ...]]]:
    assert packed is not None
    return [(p.microbatch, p.pipeline, p.spans) for p in packed.parts]


def test_forwards_lie_before_their_deadlines_0_and_1() -> None:
    ahead = side(ONE_STAGE, True)
    packed = ahead.pack(ahead.ends("before", True), free(ONE_STAGE))
    assert places(packed) == [(0, 0, ((-1.0, 0.0),)), (1, 1, ((0.0, 1.0),))]
    assert packed is not None and packed.last == -1.0


def test_backwards_start_after_their_releases_6_and_9() -> None:
    """EB0's kernels lie in the gap from 6 to 7 and after 9."""
    behind = side(ONE_STAGE, False)
    owners = {0: [0], 1: [1]}
    packed = behind.pack(behind.ends("after", True), free(ONE_STAGE), owners=owners)
    assert places(packed) == [(0, 0, ((6.0, 10.0),)), (1, 1, ((9.0, 11.0),))]
    assert packed is not None and packed.last == 11.0
    without = behind.pack(behind.ends("after", False), free(ONE_STAGE), owners=owners)
    assert places(without) == [(0, 0, ((9.0, 11.0),)), (1, 1, ((9.0, 11.0),))]


def test_without_owners_the_pipeline_that_is_done_first() -> None:
    """EB0 would end at 10 on pipeline 0 and does at 9 on pipeline 1; EB1 at 11 on both."""
    behind = side(ONE_STAGE, False)
    packed = behind.pack(behind.ends("after", True), free(ONE_STAGE))
    assert places(packed) == [(0, 1, ((7.0, 9.0),)), (1, 0, ((9.0, 11.0),))]


def test_owners_are_respected() -> None:
    ahead = side(ONE_STAGE, True)
    owners = {0: [1], 1: [0]}
    packed = ahead.pack(ahead.ends("before", True), free(ONE_STAGE), owners=owners)
    assert sorted(places(packed)) == [(0, 1, ((-1.0, 0.0),)), (1, 0, ((-1.0, 0.0),))]
    assert packed is not None and packed.owners() == owners


def test_two_stages_pass_microbatches_on() -> None:
    ahead, behind = side(TWO_STAGES, True), side(TWO_STAGES, False)
    packed = ahead.pack(ahead.ends("before", True), free(TWO_STAGES))
    assert places(packed) == [
        (0, 0, ((-1.0, -0.5), (-0.5, 0.0))),
        (1, 0, ((-0.5, 0.0), (0.5, 1.0))),
    ]
    packed = behind.pack(behind.ends("after", True), free(TWO_STAGES))
    assert places(packed) == [
        (0, 0, ((9.0, 10.0), (7.0, 8.0))),
        (1, 0, ((10.0, 11.0), (9.0, 10.0))),
    ]


def test_units_of_a_spread_microbatch_share_the_pipelines() -> None:
    """EF1 has rank 1 until 0.5 too, so EF0's units come one on each rank."""
    ahead = side(ONE_STAGE, True)
    packed = ahead.pack(ahead.ends("before", True), free(ONE_STAGE), frozenset({0}))
    assert places(packed) == [
        (0, 1, ((-0.5, 0.0),)),
        (0, 0, ((-0.5, 0.0),)),
        (1, 1, ((0.0, 1.0),)),
    ]
    assert packed is not None
    assert [p.unit for p in packed.parts] == [True, True, False]
    assert packed.owners() == {0: [1, 0], 1: [1]}


def test_no_room() -> None:
    ahead, behind = side(ONE_STAGE, True), side(ONE_STAGE, False)
    assert ahead.pack(ahead.ends("none", True), free(ONE_STAGE)) is None
    assert behind.pack(behind.ends("none", True), free(ONE_STAGE)) is None
    fits = ahead.pack(
        lambda i, rank, unit: ahead.rooms.get(rank, True, unit, "before", False), free(ONE_STAGE)
    )
    assert fits is not None


def test_nothing_is_packed_where_others_are() -> None:
    taken = Taken(LINE, 1)
    taken.add(ONE_STAGE, Packed((Part(0, 0, False, ((-3.0, -0.5),)),), -3.0))
    ahead = side(ONE_STAGE, True)
    only = {0: [0], 1: [0]}
    packed = ahead.pack(ahead.ends("before", True), taken.free(ONE_STAGE), owners=only)
    assert places(packed) == [(0, 0, ((-4.5, -3.5),)), (1, 0, ((-3.5, 0.0),))]


def test_copies_take_their_slices_only() -> None:
    pair = EncoderPlan(2, 1, 2, kernels(1.0, 1), None)  # pipelines 0 and 1 on rank 0, 2 and 3 on 1
    taken = Taken(LINE, 2)
    taken.add(pair, Packed((Part(0, 1, False, ((-1.0, 0.0),)),), -1.0))
    every, without = [(-FAR, FAR)], [(-FAR, -1.0), (0.0, FAR)]
    assert taken.free(pair) == [[every], [without], [every], [every]]
    assert taken.free(ONE_STAGE) == [[without], [every]], "needs both halves of rank 0"
    with pytest.raises(ValueError, match="3 copies do not divide 2 slices"):
        taken.free(EncoderPlan(2, 1, 3, kernels(1.0, 1), None))
    assert slices([pair, EncoderPlan(2, 1, 3, kernels(1.0, 1), None)]) == 6
    assert slices([]) == 1


def test_of_copies_the_one_that_others_left_free() -> None:
    pair = EncoderPlan(2, 1, 2, kernels(1.0, 1), None)
    taken = Taken(LINE, 2)
    for j in (0, 2, 3):
        taken.add(pair, Packed((Part(0, j, False, ((-5.0, 1.0),)),), -5.0))
    ahead = side(pair, True)
    packed = ahead.pack(ahead.ends("before", True), taken.free(pair))
    assert places(packed) == [(0, 1, ((-2.0, -1.0),)), (1, 1, ((-1.0, 0.0),))]


def test_crossing_work_is_taken_as_it_recurs() -> None:
    """Steps of 11.5 from -1 to 10.5: what runs from -3 on runs from 8.5 on for the next."""
    line = by_hand(all_gather=1.0, reduce_scatter=1.5)
    single = EncoderPlan(2, 1, 1, kernels(1.0, 1), None, True)
    taken = Taken(line, 1)
    taken.add(single, Packed((Part(0, 0, False, ((-3.0, -0.5),)),), -3.0), crosses=True)
    assert taken.free(single)[0][0] == [(-FAR, -1.0), (-0.5, 8.5), (10.5, FAR)]
    assert taken.free(single, crosses=True)[0][0] == [
        (-FAR, -12.5),
        (-12.0, -3.0),
        (-0.5, 8.5),
        (10.5, FAR),
    ]


def test_work_outside_the_step_is_not_in_the_way_of_crossing_work() -> None:
    """Delay and tail put steps apart."""
    taken = Taken(LINE, 1)
    taken.add(ONE_STAGE, Packed((Part(0, 0, False, ((-3.0, 0.5),)),), -3.0))
    taken.add(ONE_STAGE, Packed((Part(0, 0, False, ((8.0, 12.0),)),), 12.0))
    single = EncoderPlan(2, 1, 1, kernels(1.0, 1), None, True)
    assert taken.free(single, crosses=True)[0][0] == [
        (-FAR, -9.0),
        (-8.5, -1.0),
        (0.5, 8.0),
        (9.0, FAR),
    ]


def test_negated() -> None:
    packed = Packed((Part(0, 0, False, ((-2.0, -1.0), (0.0, 3.0))), Part(1, 1, True, ())), -2.0)
    there = packed.negated()
    assert there.parts[1].spans == ((1.0, 2.0), (-3.0, 0.0))
    assert there.last == 2.0
    assert there.negated() == packed
    assert negated_free([[[(-FAR, 1.0), (2.0, 3.0)]]]) == [[[(-3.0, -2.0), (-1.0, FAR)]]]


def test_a_release_holds_kernels_back() -> None:
    """pack itself, in time that runs forward."""
    rooms = Rooms(LINE, ONE_STAGE, SlotRule())
    work = ONE_STAGE.backward
    assert work is not None
    packed = pack(
        ONE_STAGE,
        work,
        [1, 0],
        [2.5, 6.5],
        lambda i, rank, unit: rooms.get(rank, False, unit, "both", True),
        free(ONE_STAGE),
        owners={0: [0], 1: [0]},
    )
    assert places(packed) == [(1, 0, ((9.0, 11.0),)), (0, 0, ((11.0, 13.0),))]
