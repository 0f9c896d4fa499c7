"""An encoder's work as kernels."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus_jax.fill.encoder import EncoderPlan, LayerPass, work
from optimus_jax.fill.windows import Kernel
from optimus_jax.schedule.task import ScheduleError
from tests.fill.random_fillings import kernels

LAYER = LayerPass(compute=0.9, communication=0.3, kernels=3)


def near(kernel: Kernel) -> tuple[object, object]:
    return pytest.approx(kernel.compute), pytest.approx(kernel.full)


def test_whole_kernels_by_hand() -> None:
    made = work(LAYER, layers=5, stages=2, pipelines=4)
    assert near(made.whole) == (0.3, 0.4)
    assert near(made.unit) == (0.075, 0.1)
    assert made.counts == made.unit_counts == (9, 6)
    assert made.seconds == pytest.approx(5 * 1.2)
    assert made.through(spread=False) == made.seconds
    assert made.through(spread=True) == pytest.approx(5 * 1.2 / 4)


def test_long_kernels_are_cut() -> None:
    """0.3 into three of 0.1, and units of 0.15 into two of 0.075."""
    made = work(LAYER, layers=2, stages=1, pipelines=2, cut=0.1)
    assert near(made.whole) == (0.1, pytest.approx(0.4 / 3))
    assert near(made.unit) == (0.075, 0.1)
    assert (made.counts, made.unit_counts) == ((18,), (12,))
    assert work(LAYER, 2, 1, 2, cut=0.3).counts == (6,), "what just fits stays whole"


@given(
    st.floats(0.01, 10),
    st.floats(0, 10),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(1, 8),
    st.none() | st.floats(0.005, 5),
)
def test_cutting_and_spreading_add_no_work(
    compute: float, communication: float, count: int, layers: int, pipelines: int, cut: float | None
) -> None:
    made = work(LayerPass(compute, communication, count), layers, 1, pipelines, cut)
    assert made.seconds == pytest.approx(layers * (compute + communication))
    assert pipelines * made.through(spread=True) == pytest.approx(made.seconds)
    if cut:
        assert made.whole.compute <= cut * (1 + 1e-6)
        assert made.unit.compute <= cut * (1 + 1e-6)


def test_pipelines_and_their_ranks() -> None:
    plan = EncoderPlan(4, 2, 3, kernels(1.0, 1, 1), kernels(2.0, 1, 1))
    assert plan.pipelines == 6
    assert [plan.first(j) for j in range(6)] == [0, 0, 0, 2, 2, 2]
    assert plan.seconds == 6.0
    assert EncoderPlan(4, 2, 3, kernels(1.0, 1, 1), None).seconds == 2.0


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(ScheduleError, match="2 encoder layers cannot fill 3 encoder stages"):
        work(LAYER, layers=2, stages=3, pipelines=1)
    with pytest.raises(ScheduleError, match="3 encoder stages do not divide the LLM's 4 pipeline"):
        EncoderPlan(4, 3, 1, kernels(1.0, 1, 1, 1), None)
