"""Orders of actions: complete, without deadlock, and those of the papers."""

from __future__ import annotations

import itertools
import re

import pytest

from optimus_jax.schedule.action_orders import (
    ACTION_ORDERS,
    deferred_warmup,
    gpipe,
    interleaved_1f1b,
    looped_bfs,
    one_f_one_b,
    rank_of_stage,
)
from optimus_jax.schedule.actions import (
    Action,
    check,
    from_csv,
    time_actions,
    to_csv,
)
from optimus_jax.schedule.pipeline import ORDERS
from optimus_jax.schedule.task import Pipeline, ScheduleError
from tests.schedule.torch_orders_test import own_table


@pytest.mark.parametrize("name", ACTION_ORDERS)
def test_equal_to_the_picture_in_the_docstring(name: str) -> None:
    order = ACTION_ORDERS[name]
    lines = re.findall(r"^ +([0-9]F0,.*)$", order.__doc__ or "", re.MULTILINE)
    picture = from_csv("\n".join(lines))
    assert len(picture) == 2
    chunks = len({action.stage for action in picture[0]})
    microbatches = 1 + max(action.microbatch for action in picture[0])
    assert order(2, microbatches, chunks) == picture


def test_fewer_microbatches_than_stages() -> None:
    assert to_csv(one_f_one_b(4, 2)).split() == [
        "0F0,0F1,0B0,0B1",
        "1F0,1F1,1B0,1B1",
        "2F0,2F1,2B0,2B1",
        "3F0,3B0,3F1,3B1",
    ]
    assert to_csv(interleaved_1f1b(3, 1, 2)).split() == [
        "0F0,3F0,3B0,0B0",
        "1F0,4F0,4B0,1B0",
        "2F0,5F0,5B0,2B0",
    ]


@pytest.mark.parametrize("name", ACTION_ORDERS)
def test_complete_and_without_deadlock(name: str) -> None:
    checked = 0
    for stages, chunks, microbatches in itertools.product((1, 2, 3, 5), (1, 2, 3), range(1, 12)):
        table = own_table(name, stages, microbatches, chunks)
        if table is not None:
            check(table, stages, microbatches, chunks, rank_of_stage(name, stages, chunks))
            checked += 1
    assert checked >= 44


@pytest.mark.parametrize(
    ("stages", "microbatches", "chunks"), [(1, 3, 1), (2, 5, 1), (4, 2, 1), (2, 4, 2), (4, 8, 3)]
)
def test_equal_to_the_orders_of_tasks(stages: int, microbatches: int, chunks: int) -> None:
    name = "1f1b" if chunks == 1 else "interleaved_1f1b"
    orders = ORDERS["1f1b"](Pipeline(stages, microbatches, chunks))
    assert ACTION_ORDERS[name](stages, microbatches, chunks) == tuple(
        tuple(Action(t.chunk * stages + device, str(t.kind), t.microbatch) for t in order)
        for device, order in enumerate(orders)
    )


def test_warmup_of_megatron_and_deferred() -> None:
    """Counts of P4 V2 and P8 V12, by hand: 2(P-r-1) + (V-1)P and (P-r-1) + (V-1)P."""
    table = interleaved_1f1b(4, 8, 2)
    assert [_warmup(actions) for actions in table] == [10, 8, 6, 4]
    assert deferred_warmup(4, 2) == (7, 6, 5, 4)
    assert deferred_warmup(8, 12) == (95, 94, 93, 92, 91, 90, 89, 88)
    assert deferred_warmup(4, 1) == (3, 2, 1, 0)
    for warmup in [(7, 6, 5, 4), (8, 7, 6, 5), (16, 16, 16, 16)]:
        table = interleaved_1f1b(4, 8, 2, warmup)
        assert [min(_warmup(actions), 15) for actions in table] == [min(w, 15) for w in warmup]
    assert interleaved_1f1b(4, 8, 2, (10, 8, 6, 4)) == interleaved_1f1b(4, 8, 2)


def _warmup(actions: tuple[Action, ...]) -> int:
    """Forwards before the pair of the first backward."""
    return [action.kind for action in actions].index("B") - 1


def test_deferred_warmup_of_one_chunk_is_1f1b() -> None:
    assert interleaved_1f1b(4, 7, 1, deferred_warmup(4, 1)) == one_f_one_b(4, 7)


def test_deferred_warmup_follows_the_groups() -> None:
    """10 microbatches on 4 stages go in 2 groups of 5, so the last rank needs 5 and not 4."""
    assert deferred_warmup(4, 2, microbatches=10) == (8, 7, 6, 5)
    interleaved_1f1b(4, 10, 2, deferred_warmup(4, 2, microbatches=10))
    with pytest.raises(ScheduleError, match=r"with warm-up forwards \[7, 6, 5, 4\] .*deadlocks"):
        interleaved_1f1b(4, 10, 2, deferred_warmup(4, 2))


FORWARD_POINTS = {False: (0, 1, 2, 3, 8, 9, 10, 16), True: (0, 1, 2, 3, 16, 19, 22, 25)}
BACKWARD_POINTS = {False: (29, 32, 34, 37), True: (28, 31, 34, 37)}


@pytest.mark.parametrize("deferred", [False, True])
def test_dependency_points_of_the_papers_example(deferred: bool) -> None:
    """4 devices, 2 chunks, 8 microbatches (Optimus, figure 12): the last four points are deferred
    at the same length of the step."""
    starts, ends, length = _points(4, 2, 8, deferred)
    assert starts == FORWARD_POINTS[deferred]
    assert ends == (*BACKWARD_POINTS[deferred], 51, 53, 55, 57)
    assert length == 57


@pytest.mark.parametrize(("microbatches", "length"), [(16, 597), (24, 885), (32, 1173)])
def test_deferral_costs_nothing_without_transfers(microbatches: int, length: float) -> None:
    starts, ends, end = _points(8, 12, microbatches, deferred=False)
    late_starts, late_ends, late_end = _points(8, 12, microbatches, deferred=True)
    assert end == late_end == length
    assert late_starts[:8] == starts[:8]
    later = [b - a for a, b in zip(starts[8:], late_starts[8:], strict=True)]
    assert min(later) >= 16 and max(later) <= 28
    earlier = [a - b for a, b in zip(ends, late_ends, strict=True)]
    assert min(earlier) >= 0 and max(earlier) <= 5


@pytest.mark.parametrize(
    ("sizes", "p2p", "length", "deferred_length"),
    [
        ((4, 2, 8), 0.05, 57.7, 58.5),
        ((4, 2, 8), 0.2, 59.8, 63.0),
        ((8, 12, 16), 0.05, 606.5, 615.5),
        ((8, 12, 24), 0.2, 923.0, 992.6),
        ((8, 12, 32), 0.05, 1182.5, 1208.3),
    ],
    ids=str,
)
def test_deferral_costs_time_with_transfers(
    sizes: tuple[int, int, int], p2p: float, length: float, deferred_length: float
) -> None:
    """Figures of another simulation of the same model."""
    assert _points(*sizes, deferred=False, p2p=p2p)[2] == pytest.approx(length)
    assert _points(*sizes, deferred=True, p2p=p2p)[2] == pytest.approx(deferred_length)


def _points(
    stages: int, chunks: int, microbatches: int, deferred: bool, p2p: float = 0.0
) -> tuple[tuple[float, ...], tuple[float, ...], float]:
    """Forward and backward dependency points, and the length of the step; F takes 1, B 2."""
    warmup = deferred_warmup(stages, chunks) if deferred else None
    table = interleaved_1f1b(stages, microbatches, chunks, warmup)
    virtual = stages * chunks
    ranks = rank_of_stage("interleaved_1f1b", stages, chunks)
    seconds = {"F": (1.0,) * virtual, "B": (2.0,) * virtual}
    times = time_actions(table, ranks, seconds, p2p)
    first = dict(zip(table[0], times[0], strict=True))
    return (
        tuple(first[0, "F", i][0] for i in range(microbatches)),
        tuple(first[0, "B", i][1] for i in range(microbatches)),
        max(row[-1][1] for row in times),
    )


def test_ranks_of_virtual_stages() -> None:
    assert rank_of_stage("interleaved_1f1b", 3, 2) == (0, 1, 2, 0, 1, 2)
    assert rank_of_stage("gpipe", 4, 1) == (0, 1, 2, 3)
    assert rank_of_stage("zb_v", 3, 2) == (0, 1, 2, 2, 1, 0)
    with pytest.raises(ScheduleError, match="no order is called '2f2b'; there are gpipe, 1f1b,"):
        rank_of_stage("2f2b", 3, 2)


@pytest.mark.parametrize(
    ("stages", "microbatches", "near"),
    [(4, 9, "8 and 10"), (3, 7, "6 and 8"), (4, 13, "12 and 15"), (2, 5, "4 and 6")],
)
@pytest.mark.parametrize("name", ["interleaved_1f1b", "interleaved_zero_bubble"])
def test_interleaving_needs_equal_groups(
    name: str, stages: int, microbatches: int, near: str
) -> None:
    rounds = microbatches // stages
    with pytest.raises(
        ScheduleError, match=f"{microbatches} do not make {rounds}, near it are {near}$"
    ):
        ACTION_ORDERS[name](stages, microbatches, 2)
    for count in map(int, near.split(" and ")):
        ACTION_ORDERS[name](stages, count, 2)


@pytest.mark.parametrize(
    ("warmup", "words"),
    [
        ((3, 4), "rank 0 at 2B0 waits for 3B0 of rank 1; rank 1 at 1F2 waits for 0F2 of rank 0"),
        ((2,), r"one count from 0 on for each of 2 ranks, got \[2\]"),
        ((2, -1), r"one count from 0 on for each of 2 ranks, got \[2, -1\]"),
    ],
)
def test_warmups_that_do_not_exist(warmup: tuple[int, ...], words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        interleaved_1f1b(2, 6, 2, warmup)


def test_sizes_that_do_not_exist() -> None:
    with pytest.raises(ScheduleError, match="gpipe runs one chunk .* got 2; looped_bfs runs more"):
        gpipe(2, 4, 2)
    with pytest.raises(ScheduleError, match="1f1b runs one chunk .* got 3; interleaved_1f1b runs"):
        one_f_one_b(2, 4, 3)
    for order in ACTION_ORDERS.values():
        for sizes in [(0, 2, 1), (2, 0, 1), (2, 2, 0)]:
            with pytest.raises(ScheduleError, match="sizes of a pipeline must be positive"):
                order(*sizes)
    with pytest.raises(
        ScheduleError, match="must be positive: -1 stages, 2 microbatches, 1 chunks"
    ):
        looped_bfs(-1, 2)
