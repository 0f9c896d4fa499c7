"""Action tables: notation, csv, what a complete table is, and when its actions run."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus_jax.schedule.action_orders import ACTION_ORDERS, interleaved_1f1b, rank_of_stage
from optimus_jax.schedule.actions import (
    Action,
    ActionTable,
    check,
    from_csv,
    time_actions,
    to_csv,
)
from optimus_jax.schedule.pipeline import one_f_one_b
from optimus_jax.schedule.simulate import Durations, event_driven
from optimus_jax.schedule.task import Pipeline, Schedule, ScheduleError
from optimus_jax.schedule.zero_bubble import zb_h1, zb_v

NUMBERS = st.integers(0, 300)
ACTIONS = st.builds(Action, NUMBERS, st.sampled_from("FBIW"), NUMBERS)


def test_notation() -> None:
    assert str(Action(3, "B", 12)) == "3B12"
    assert to_csv(((Action(0, "F", 0), Action(0, "I", 0), Action(0, "W", 0)), ())) == (
        "0F0,0I0,0W0\n\n"
    )


@given(st.lists(st.lists(ACTIONS).map(tuple)).map(tuple))
def test_every_table_reads_back(table: ActionTable) -> None:
    assert from_csv(to_csv(table)) == table


def test_empty_cells_are_idle_time() -> None:
    table = from_csv("0F0,,0F1, ,0B0,0B1\r\n,1F0,1B0,1F1,1B1\r\n")
    assert to_csv(table) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("1X0", "is not an action; actions look like 0F0, 3B1, 2I0, 2W0"),
        ("1F", "is not an action"),
        ("F0", "is not an action"),
        ("1f0", "is not an action"),
        ("01F0", "is not an action"),
        ("1F0 1B0", "is not an action"),
        ("1F0x", "is not an action"),
        ("1F²", "is not an action"),
        ("1SEND_F0", "computes nothing; torch leaves such cells out with format='compute_only'"),
        ("1UNSHARD", "computes nothing"),
        ("1RESHARD", "computes nothing"),
        ("1REDUCE_GRAD", "computes nothing"),
        ("(1F0;1B0)OVERLAP_F_B", "runs a forward and a backward at once"),
    ],
)
def test_other_cells_are_named(cell: str, words: str) -> None:
    with pytest.raises(ScheduleError) as error:
        from_csv(f"0F0,0B0\n1F1,,{cell}\n")
    assert str(error.value).startswith(f"row 2, column 3: '{cell}' {words}")


TABLE = "0F0,0F1,0B0,0B1\n1F0,1I0,1W0,1F1,1B1\n"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("0F1,", "", "^0F1 is missing on rank 0$"),
        ("1B1", "", "^1B1 is missing on rank 1$"),
        ("1I0,", "", "^1I0 is missing on rank 1$"),
        ("1W0,", "", "^1W0 is missing on rank 1$"),
        ("0F0,", "0F0,0F0,", "^0F0 stands twice on rank 0$"),
        ("1I0,", "1I0,1B0,", "^1B0 and 1I0 both stand on rank 1: a backward is whole .* or split"),
        ("0F0,", "0F0,1F0,", "^1F0 stands on rank 0, but stage 1 is on rank 1$"),
        ("0F0,", "0F0,2F0,", "^2F0 on rank 0: .* 2 virtual stages and 2 microbatches$"),
        ("0F0,", "0F0,0F2,", "^0F2 on rank 0: .* 2 virtual stages and 2 microbatches$"),
        ("0F0,0F1,0B0", "0B0,0F0,0F1", "rank 0 at 0B0 waits for 1I0 of rank 1; rank 1 at 1F0"),
        ("1I0,1W0", "1W0,1I0", "^the order deadlocks: rank 1 at 1W0 waits for 1I0 of rank 1$"),
        ("1F1,1B1", "1B1,1F1", "^the order deadlocks: rank 1 at 1B1 waits for 1F1 of rank 1$"),
        ("\n1F0", ",1F0", "^1 rows of actions for 2 ranks$"),
    ],
)
def test_tables_that_do_not_stand_the_check(old: str, new: str, words: str) -> None:
    check(from_csv(TABLE), 2, 2, 1, (0, 1))
    assert old in TABLE
    with pytest.raises(ScheduleError, match=words):
        check(from_csv(TABLE.replace(old, new)), 2, 2, 1, (0, 1))


def test_the_check_names_unknown_kinds_and_counts_ranks() -> None:
    with pytest.raises(ScheduleError, match="0EF0 on rank 0: there are the kinds F, B, I, W"):
        check(((Action(0, "EF", 0),),), 1, 1, 1, (0,))
    with pytest.raises(ScheduleError, match="2 ranks of virtual stages for 2 stages x 2 chunks"):
        check(from_csv(TABLE), 2, 2, 2, (0, 1))


def test_a_deadlock_over_two_ranks_names_both_waits() -> None:
    table = from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1")
    with pytest.raises(ScheduleError) as error:
        check(table, 2, 2, 1, (0, 1))
    assert str(error.value) == (
        "the order deadlocks: rank 0 at 0B0 waits for 1B0 of rank 1;"
        " rank 1 at 1F1 waits for 0F1 of rank 0"
    )


def test_time_by_hand_in_a_loop() -> None:
    """F 1, I 2, W 3, and half a second between ranks."""
    times = time_actions(zb_h1(2, 1), (0, 1), {"F": (1, 1), "I": (2, 2), "W": (3, 3)}, p2p=0.5)
    assert times == (
        ((0.0, 1.0), (5.0, 7.0), (7.0, 10.0)),
        ((1.5, 2.5), (2.5, 4.5), (4.5, 7.5)),
    )


def test_time_by_hand_in_a_v() -> None:
    """The turn of the V stays on its rank and takes no transfer."""
    table, ranks = zb_v(2, 1), rank_of_stage("zb_v", 2, 2)
    assert to_csv(table).split() == ["0F0,3F0,3I0,3W0,0I0,0W0", "1F0,2F0,2I0,2W0,1I0,1W0"]
    seconds = {kind: (value,) * 4 for kind, value in (("F", 1), ("I", 2), ("W", 3))}
    first, second = time_actions(table, ranks, seconds, p2p=0.5)
    assert [start for start, _ in first] == [0.0, 4.0, 5.0, 7.0, 15.0, 17.0]
    assert [start for start, _ in second] == [1.5, 2.5, 7.5, 9.5, 12.5, 14.5]
    assert (first[-1][1], second[-1][1]) == (20.0, 17.5)


def test_lengths_by_stage_and_by_action_are_the_same() -> None:
    table, ranks = zb_v(3, 5), rank_of_stage("zb_v", 3, 2)
    draw = random.Random(0)
    seconds = {kind: tuple(draw.uniform(1, 2) for _ in ranks) for kind in "FIW"}
    by_action = time_actions(table, ranks, lambda a: seconds[a.kind][a.stage], 0.1)
    assert time_actions(table, ranks, seconds, 0.1) == by_action


@pytest.mark.parametrize("p2p", [0.0, 0.3])
@pytest.mark.parametrize(("stages", "microbatches", "chunks"), [(3, 5, 1), (2, 6, 3), (4, 8, 2)])
def test_equal_to_the_simulation_of_tasks(
    stages: int, microbatches: int, chunks: int, p2p: float
) -> None:
    """The simulation that the executor is planned with, on drawn lengths."""
    draw = random.Random(stages)
    virtual = stages * chunks
    forward, backward = (tuple(draw.uniform(1, 2) for _ in range(virtual)) for _ in "FB")
    pipe = Pipeline(stages, microbatches, chunks)
    durations = Durations(forward, backward, transfer=p2p)
    wanted = event_driven(Schedule(pipe, one_f_one_b(pipe)), durations).intervals
    name = "1f1b" if chunks == 1 else "interleaved_1f1b"
    times = time_actions(
        ACTION_ORDERS[name](stages, microbatches, chunks),
        rank_of_stage(name, stages, chunks),
        {"F": forward, "B": backward},
        p2p,
    )
    for row, own in zip(times, wanted, strict=True):
        assert [x for pair in row for x in pair] == pytest.approx([x for pair in own for x in pair])


def test_no_action_starts_early_and_none_waits_for_nothing() -> None:
    """Each starts exactly when its rank or its input, whichever is later, is there."""
    stages, microbatches, p2p = 4, 9, 0.25
    table, ranks = zb_v(stages, microbatches), rank_of_stage("zb_v", stages, 2)
    draw = random.Random(1)
    times = time_actions(table, ranks, lambda action: draw.uniform(0.5, 2), p2p)
    end = {
        action: (rank, t[1])
        for rank, actions in enumerate(table)
        for action, t in zip(actions, times[rank], strict=True)
    }
    last = 2 * stages - 1
    for rank, actions in enumerate(table):
        free = 0.0
        for (stage, kind, i), (start, until) in zip(actions, times[rank], strict=True):
            if kind == "F":
                source = (stage - 1, "F", i)
            elif kind == "W":
                source = (stage, "I", i)
            else:
                source = (stage + 1, "I", i) if stage < last else (stage, "F", i)
            home, made = end.get(source, (rank, 0.0))
            assert start == max(free, made + p2p * (home != rank))
            free = until


def test_lengths_that_do_not_fit() -> None:
    table = from_csv(TABLE)
    seconds = {kind: (1.0, 1.0) for kind in "FBIW"}
    with pytest.raises(ScheduleError, match="3 seconds of B for 2 virtual stages"):
        time_actions(table, (0, 1), seconds | {"B": (1.0,) * 3})
    with pytest.raises(ScheduleError, match="there are no seconds of I, W"):
        time_actions(table, (0, 1), {"F": (1.0, 1.0), "B": (1.0, 1.0)})
    with pytest.raises(ScheduleError, match="actions cannot take negative time"):
        time_actions(table, (0, 1), lambda action: -1.0)
    with pytest.raises(ScheduleError, match="a transfer cannot take negative time, got -0.5"):
        time_actions(table, (0, 1), seconds, p2p=-0.5)
    with pytest.raises(ScheduleError, match="1F0 on rank 1: there are 1 virtual stages"):
        time_actions(table, (0,), {kind: (1.0,) for kind in "FBIW"})
    with pytest.raises(ScheduleError, match="1F0 on rank 0 waits for 0F0, which no rank runs"):
        time_actions(from_csv("1F0"), (0, 1), seconds)


def test_a_large_table_takes_milliseconds() -> None:
    table = interleaved_1f1b(8, 32, 12)
    ranks, seconds = rank_of_stage("interleaved_1f1b", 8, 12), {"F": (1.0,) * 96, "B": (2.0,) * 96}
    assert sum(map(len, table)) == 6144
    took = []
    for _ in range(5):
        begin = time.process_time()
        time_actions(table, ranks, seconds)
        took.append(time.process_time() - begin)
    assert min(took) < 0.04
