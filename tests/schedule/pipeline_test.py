"""Orders of the LLM's tasks: as pictures, in closed form, and what they keep in flight."""

from __future__ import annotations

import textwrap

import pytest

from optimus_jax.schedule.pipeline import ORDERS, gpipe, one_f_one_b
from optimus_jax.schedule.simulate import Durations, event_driven
from optimus_jax.schedule.task import Kind, Pipeline, Schedule, ScheduleError
from optimus_jax.schedule.validate import check_complete

PICTURES = {
    ("gpipe", 2, 3, 1): """
        0: F0 F1 F2 B0 B1 B2
        1: F0 F1 F2 B0 B1 B2
    """,
    ("gpipe", 4, 4, 1): """
        0: F0 F1 F2 F3 B0 B1 B2 B3
        1: F0 F1 F2 F3 B0 B1 B2 B3
        2: F0 F1 F2 F3 B0 B1 B2 B3
        3: F0 F1 F2 F3 B0 B1 B2 B3
    """,
    ("1f1b", 2, 3, 1): """
        0: F0 F1 B0 F2 B1 B2
        1: F0 B0 F1 B1 F2 B2
    """,
    ("1f1b", 4, 4, 1): """
        0: F0 F1 F2 F3 B0 B1 B2 B3
        1: F0 F1 F2 B0 F3 B1 B2 B3
        2: F0 F1 B0 F2 B1 F3 B2 B3
        3: F0 B0 F1 B1 F2 B2 F3 B3
    """,
    ("1f1b", 4, 2, 1): """
        0: F0 F1 B0 B1
        1: F0 F1 B0 B1
        2: F0 F1 B0 B1
        3: F0 B0 F1 B1
    """,
    ("1f1b", 2, 2, 2): """
        0: F0 F1 F0c1 F1c1 B0c1 B1c1 B0 B1
        1: F0 F1 F0c1 B0c1 F1c1 B1c1 B0 B1
    """,
    ("1f1b", 2, 4, 2): """
        0: F0 F1 F0c1 F1c1 F2 B0c1 F3 B1c1 F2c1 B0 F3c1 B1 B2c1 B3c1 B2 B3
        1: F0 F1 F0c1 B0c1 F1c1 B1c1 F2 B0 F3 B1 F2c1 B2c1 F3c1 B3c1 B2 B3
    """,
}


@pytest.mark.parametrize(("case", "picture"), PICTURES.items(), ids=str)
def test_orders_look_like_their_pictures(case: tuple[str, int, int, int], picture: str) -> None:
    name, *sizes = case
    pipe = Pipeline(*sizes)
    assert str(Schedule(pipe, ORDERS[name](pipe))) == textwrap.dedent(picture).strip()


SIZES = [(p, m, v) for p in (1, 2, 3, 4) for v in (1, 2, 3) for m in (1, p, 2 * p, 2 * p + 1)]
LEGAL = [(p, m, v) for p, m, v in SIZES if v == 1 or m % p == 0]


@pytest.mark.parametrize("sizes", LEGAL, ids=str)
def test_orders_are_complete_and_run(sizes: tuple[int, int, int]) -> None:
    pipe = Pipeline(*sizes)
    for order in ORDERS.values():
        if order is gpipe and pipe.chunks > 1:
            continue
        schedule = Schedule(pipe, order(pipe))
        check_complete(schedule)
        event_driven(schedule, Durations.uniform(pipe))


@pytest.mark.parametrize(
    ("stages", "microbatches", "end"),
    [(2, 4, 15), (2, 8, 27), (4, 8, 33), (4, 16, 57), (8, 16, 69)],
)
@pytest.mark.parametrize("order", ORDERS)
def test_known_times(order: str, stages: int, microbatches: int, end: float) -> None:
    pipe = Pipeline(stages, microbatches)
    assert event_driven(Schedule(pipe, ORDERS[order](pipe)), Durations.uniform(pipe)).end == end


def test_known_time_interleaved() -> None:
    pipe = Pipeline(4, 8, chunks=2)
    durations = Durations.uniform(pipe, forward=2.0, backward=4.0)
    assert durations.forward == (1.0,) * 8
    assert event_driven(Schedule(pipe, one_f_one_b(pipe)), durations).end == 57


@pytest.mark.parametrize("forward", [1.0, 0.7])
@pytest.mark.parametrize("backward", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 2), (2, 6), (3, 6), (4, 8)])
def test_idle_time_in_closed_form(
    stages: int, microbatches: int, chunks: int, backward: float, forward: float
) -> None:
    """(P-1)(f+b) on every device with whole stages; V chunks divide it by V."""
    pipe = Pipeline(stages, microbatches, chunks)
    timing = event_driven(
        Schedule(pipe, one_f_one_b(pipe)), Durations.uniform(pipe, forward, backward)
    )
    for intervals in timing.intervals:
        idle = timing.end - sum(end - start for start, end in intervals)
        assert idle == pytest.approx((stages - 1) * (forward + backward) / chunks)


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 1), (2, 5), (4, 3), (4, 12)])
def test_1f1b_keeps_few_microbatches_in_flight(stages: int, microbatches: int) -> None:
    pipe = Pipeline(stages, microbatches)
    most = [_most_in_flight(order) for order in one_f_one_b(pipe)]
    assert most == [min(microbatches, stages - s) for s in range(stages)]
    assert [_most_in_flight(order) for order in gpipe(pipe)] == [microbatches] * stages


def _most_in_flight(order: tuple) -> int:
    now = most = 0
    for task in order:
        now += 1 if task.kind == Kind.F else -1
        most = max(most, now)
    return most


@pytest.mark.parametrize(
    ("stages", "microbatches", "near"),
    [(2, 5, "4 or 6"), (4, 9, "8 or 12"), (4, 3, "4"), (3, 1, "3"), (4, 7, "4 or 8")],
)
def test_interleaving_needs_full_groups(stages: int, microbatches: int, near: str) -> None:
    with pytest.raises(
        ScheduleError, match=f"multiples of {stages}: got {microbatches}, near it is {near}$"
    ):
        one_f_one_b(Pipeline(stages, microbatches, chunks=2))


def test_gpipe_refuses_chunks() -> None:
    with pytest.raises(ScheduleError, match="gpipe runs one chunk for each stage, got 2"):
        gpipe(Pipeline(2, 2, chunks=2))
