"""Dependency points by hand, and the global ordering of the encoder's microbatches."""

from __future__ import annotations

import textwrap

import pytest

from optimus_jax.schedule.dependency import DependencyPoints, dependency_points, order_globally
from optimus_jax.schedule.simulate import Durations, EncoderDurations, event_driven
from optimus_jax.schedule.task import Pipeline, Schedule


def points_of(text: str, pipe: Pipeline, encoder: float) -> DependencyPoints:
    timing = event_driven(Schedule.parse(text, pipe), Durations.uniform(pipe, encoder=encoder))
    return dependency_points(timing)


def test_points_are_read_off_the_first_chunk_on_the_first_stage() -> None:
    points = points_of(
        """
        0: EF0.0 F0 F1 F0c1 F1c1 B0c1 B1c1 B0 EB0.0 B1
        1: EF0.1 F0 F1 F0c1 B0c1 F1c1 B1c1 B0 EB0.1 B1
        """,
        Pipeline(2, 2, chunks=2),
        encoder=2.0,
    )
    assert points == DependencyPoints(F={0: 1, 1: 1.5}, B={0: 7.5, 1: 11.5}, EF={0: 1}, EB={0: 7.5})


def test_last_forward_and_first_backward_of_a_microbatch_count() -> None:
    points = points_of(
        """
        0: EF0.0 EF1.0 F0 F1 B0 EB0.0 B1 EB1.0
        1: EF1.1 EF0.1 F0 B0 F1 B1 EB1.1 EB0.1
        """,
        Pipeline(2, 2),
        encoder=1.0,
    )
    assert points.EF == {0: 1, 1: 1}
    assert points.F == {0: 1, 1: 2}
    assert points.B == {0: 7, 1: 10}
    assert points.EB == {0: 7, 1: 10}
    assert points.violations() == []


def test_violations_are_told_in_words() -> None:
    kept = DependencyPoints({0: 1, 1: 2}, {0: 5, 1: 6}, {0: 1, 1: 2}, {0: 5, 1: 6})
    assert kept.violations() == []
    broken = DependencyPoints({0: 1, 1: 2}, {0: 5, 1: 6}, {0: 1.5, 1: 2}, {0: 5, 1: 4})
    assert broken.violations() == [
        "EF0 ends at 1.5, after F0 starts at 1",
        "EB1 starts at 4, before B1 ends at 6",
    ]
    assert broken.violations(tolerance=3) == []


# Device 0 encodes two microbatches of 2 seconds one after another, device 1 the third meanwhile.
ENCODED_IN_DATA_ORDER = """
    0: EF0 EF1 F0 F1 B0 F2 B1 B2 EB0 EB1
    1: EF2 F0 B0 F1 B1 F2 B2 EB2
"""


def test_finish_order_decides_and_not_data_order() -> None:
    pipe = Pipeline(2, 3)
    schedule = Schedule.parse(ENCODED_IN_DATA_ORDER, pipe)
    timing = event_driven(schedule, Durations.uniform(pipe, encoder=2.0))
    assert dependency_points(timing).EF == {0: 2, 1: 4, 2: 2}
    expected = """
        0: EF0 EF2 F0 F1 B0 F2 B1 B2 EB0 EB2
        1: EF1 F0 B0 F1 B1 F2 B2 EB1
    """
    assert str(order_globally(schedule, timing)) == textwrap.dedent(expected).strip()


def test_only_encoded_microbatches_are_renamed() -> None:
    pipe = Pipeline(2, 3)
    schedule = Schedule.parse(
        """
        0: EF0 F0 F1 B0 F2 B1 B2 EB0
        1: EF2 F0 B0 F1 B1 F2 B2 EB2
        """,
        pipe,
    )
    durations = Durations((1, 1, 1), (2, 2, 2), (EncoderDurations((4,), (8,)),))
    ordered = order_globally(schedule, event_driven(schedule, durations))
    assert ordered == schedule
    assert ordered.encoded == {0, 2}


@pytest.mark.parametrize("encoder", [0.25, 1.0, 2.0])
def test_global_order_makes_no_step_longer(encoder: float) -> None:
    pipe = Pipeline(2, 3)
    durations = Durations.uniform(pipe, encoder=encoder)
    schedule = Schedule.parse(ENCODED_IN_DATA_ORDER, pipe)
    before = event_driven(schedule, durations)
    after = event_driven(order_globally(schedule, before), durations)
    assert after.end <= before.end
    assert dependency_points(after).violations() == []
