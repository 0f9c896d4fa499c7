"""Windows against kernels placed one by one, and which idle intervals there are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus_jax.fill.backbone import ChunkPass, backbone
from optimus_jax.fill.windows import (
    FAR,
    Kernel,
    SlotRule,
    Windows,
    complement,
    intervals_of,
    negated,
)
from optimus_jax.schedule.actions import from_csv
from tests.fill.random_fillings import by_hand

Intervals = list[tuple[float, float, bool]]


@st.composite
def drawn_intervals(draw: st.DrawFn) -> Intervals:
    """In eighths, apart or touching."""
    found, at = [], draw(st.integers(-40, 0))
    for _ in range(draw(st.integers(0, 7))):
        at += draw(st.integers(0, 6))
        length = draw(st.integers(1, 14))
        found.append((at / 8, (at + length) / 8, draw(st.booleans())))
        at += length
    return found


KERNELS = st.builds(
    lambda compute, more: Kernel(compute / 8, (compute + more) / 8),
    st.integers(1, 6),
    st.integers(0, 3),
)
RULES = st.sampled_from((SlotRule(), SlotRule(contention=1.5)))
KERNEL = Kernel(1.0, 1.0)
TIMES = st.integers(-48, 120).map(lambda n: n / 8)


def one_by_one(
    intervals: Intervals, kernel: Kernel, rule: SlotRule, start: float, end: float, count: int
) -> list[tuple[float, float, bool]]:
    """The kernels that find a place within [start, end), each as early as possible."""
    placed: list[tuple[float, float, bool]] = []
    for low, high, slot in intervals:
        each = kernel.compute * rule.contention if slot else kernel.full
        at = max(low, start)
        while len(placed) < count and at + each <= min(high, end):
            placed.append((at, at + each, slot))
            at += each
    return placed


@given(drawn_intervals(), KERNELS, RULES, TIMES, TIMES, st.integers(1, 12))
def test_place_is_greedy_kernel_by_kernel(
    intervals: Intervals, kernel: Kernel, rule: SlotRule, a: float, b: float, count: int
) -> None:
    start, end = min(a, b), max(a, b)
    windows = Windows(intervals, kernel, rule)
    wanted = one_by_one(intervals, kernel, rule, start, end, count)
    first, last, left = windows.place(start, end, count)
    assert left == count - len(wanted)
    if wanted:
        assert (first, last) == (wanted[0][0], pytest.approx(wanted[-1][1]))
    found: list[tuple[float, float, bool]] = []
    for low, high, kernels, slot in windows.runs(start, end, count):
        each = (high - low) / kernels
        found += [(low + k * each, low + (k + 1) * each, slot) for k in range(kernels)]
    assert [x for piece in found for x in piece] == pytest.approx([x for p in wanted for x in p])


@given(drawn_intervals(), KERNELS, RULES, TIMES, TIMES, st.integers(1, 12))
def test_mirrored_time_places_late(
    intervals: Intervals, kernel: Kernel, rule: SlotRule, a: float, b: float, count: int
) -> None:
    """From the end back, each kernel as late as possible."""
    start, end = min(a, b), max(a, b)
    placed: list[tuple[float, float]] = []
    for low, high, slot in reversed(intervals):
        each = kernel.compute * rule.contention if slot else kernel.full
        at = min(high, end)
        while len(placed) < count and at - each >= max(low, start):
            placed.append((at - each, at))
            at -= each
    first, last, left = Windows(negated(intervals), kernel, rule).place(-end, -start, count)
    assert left == count - len(placed)
    if placed:
        assert (-first, -last) == (placed[0][1], pytest.approx(placed[-1][0]))


def test_kernels_that_fit_nowhere() -> None:
    windows = Windows([(0.0, 1.0, False), (1.0, 1.5, True)], Kernel(1.0, 1.25), SlotRule())
    assert windows.place(-10.0, 10.0, 3) == (-10.0, -10.0, 3)


def test_an_end_before_the_last_window_has_room() -> None:
    windows = Windows([(0.0, 1.0, False), (2.0, 3.0, False), (4.0, 6.0, False)], KERNEL, SlotRule())
    assert windows.place(0.5, 4.5, 5) == (2.0, 3.0, 4)
    assert windows.place(0.5, 5.0, 5) == (2.0, 5.0, 3)
    assert windows.place(0.0, 5.5, 3) == (0.0, 5.0, 0)


def test_kernels_in_slots_take_their_compute_and_contention() -> None:
    slot = [(0.0, 2.0, True)]
    assert Windows(slot, Kernel(0.5, 0.75), SlotRule()).place(0.0, 5.0, 9) == (0.0, 2.0, 5)
    assert Windows(slot, Kernel(0.5, 0.75), SlotRule(contention=1.5)).place(0.0, 5.0, 9) == (
        0.0,
        1.5,
        7,
    )


def test_idle_intervals_by_hand() -> None:
    line, rule = by_hand(all_gather=0.5, reduce_scatter=0.25), SlotRule()
    before, first, second, after = (
        (-FAR, 0, False),
        (2, 4, False),
        (6, 7, False),
        (9, FAR, False),
    )
    assert intervals_of(line, 0, rule) == [before, first, second, after]
    assert intervals_of(line, 0, rule, "before") == [before, first, second]
    assert intervals_of(line, 0, rule, "after") == [first, second, after]
    assert intervals_of(line, 0, rule, "none") == [first, second]
    assert intervals_of(line, 0, rule, "before", between=False) == [before]
    assert intervals_of(line, 1, rule) == [(-FAR, 1, False), (7, FAR, False)]
    own = [(-0.5, 0, False), first, second, (9, 9.25, False)]
    earlier = [(s - 9.75, e - 9.75, slot) for s, e, slot in own]
    assert intervals_of(line, 0, rule, "periodic") == earlier + own


@pytest.mark.parametrize(
    ("usable", "used"), [(1.0, range(6)), (0.5, (1, 3, 5)), (1 / 3, (2, 5)), (0.0, ())]
)
def test_usable_slots(usable: float, used: tuple[int, ...]) -> None:
    passes = [ChunkPass(((1.0, False), (0.5, True)) * 3)]
    line = backbone(from_csv("0F0,0B0"), (0,), {"F": passes, "B": passes})
    found = intervals_of(line, 0, SlotRule(usable=usable), "none")
    assert found == [(1.5 * k + 1, 1.5 * k + 1.5, True) for k in used]
    assert intervals_of(line, 0, SlotRule(use=False), "none") == []


def test_complement() -> None:
    assert complement([]) == [(-FAR, FAR)]
    busy = [(3.0, 4.0), (0.0, 2.0), (1.0, 1.5), (2.0, 2.5)]
    assert complement(busy) == [(-FAR, 0.0), (2.5, 3.0), (4.0, FAR)]
