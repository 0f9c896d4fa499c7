"""Orders with split backwards: their pictures, their length and what they keep in memory."""

from __future__ import annotations

import pytest

from optimus_jax.schedule.action_orders import (
    interleaved_1f1b,
    one_f_one_b,
    rank_of_stage,
)
from optimus_jax.schedule.actions import Action, ActionTable, time_actions, to_csv
from optimus_jax.schedule.task import ScheduleError
from optimus_jax.schedule.zero_bubble import interleaved_zero_bubble, zb_h1, zb_v


def length(name: str, table: ActionTable, chunks: int, **seconds: float) -> float:
    """Seconds of the step without transfers, each kind alike on every virtual stage."""
    virtual = len(table) * chunks
    lengths = {kind: (value,) * virtual for kind, value in seconds.items()}
    times = time_actions(table, rank_of_stage(name, len(table), chunks), lengths)
    return max(row[-1][1] for row in times)


def most_in_flight(actions: tuple[Action, ...], freed_by: str) -> int:
    """The most forwards of a rank whose `freed_by` is still to come."""
    now = most = 0
    for action in actions:
        now += (action.kind == "F") - (action.kind == freed_by)
        most = max(most, now)
    return most


def test_zb_h1_on_three_ranks_by_hand() -> None:
    table = zb_h1(3, 4)
    assert to_csv(table).split() == [
        "0F0,0F1,0F2,0I0,0W0,0F3,0I1,0W1,0I2,0W2,0I3,0W3",
        "1F0,1F1,1I0,1F2,1I1,1W0,1F3,1I2,1W1,1I3,1W2,1W3",
        "2F0,2I0,2F1,2I1,2F2,2I2,2W0,2F3,2I3,2W1,2W2,2W3",
    ]
    times = time_actions(table, (0, 1, 2), {kind: (1.0,) * 3 for kind in "FIW"})
    starts = [[start for start, _ in row] for row in times]
    assert starts[0] == [0, 1, 2, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    assert starts[1] == [1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    assert starts[2] == [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]


def test_zb_h1_on_four_ranks_by_hand() -> None:
    table = zb_h1(4, 4)
    assert to_csv(table).split()[::3] == [
        "0F0,0F1,0F2,0F3,0I0,0W0,0I1,0W1,0I2,0W2,0I3,0W3",
        "3F0,3I0,3F1,3I1,3F2,3I2,3F3,3I3,3W0,3W1,3W2,3W3",
    ]
    assert length("zb_h1", table, 1, F=1.0, I=1.0, W=1.0) == 15  # 4 x 3 and 3 until 3F0 starts


@pytest.mark.parametrize("stages", [3, 4])
@pytest.mark.parametrize("further", [0, 1, 5])
@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (1, 1, 0.5), (1, 1.5, 0.5), (1, 2, 1)])
def test_zb_h1_idles_as_the_paper_says(
    stages: int, further: int, f: float, i: float, w: float
) -> None:
    """(P-1)(F + I - W) where 1F1B idles (P-1)(F + I + W) (Qi et al. 2023, section 2.3),
    where W takes no longer than I."""
    microbatches = stages + further
    work = microbatches * (f + i + w)
    split = length("zb_h1", zb_h1(stages, microbatches), 1, F=f, I=i, W=w)
    whole = length("1f1b", one_f_one_b(stages, microbatches), 1, F=f, B=i + w)
    assert split - work == pytest.approx((stages - 1) * (f + i - w))
    assert whole - work == pytest.approx((stages - 1) * (f + i + w))


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (3, 2), (3, 8), (4, 4), (4, 12)])
def test_zb_h1_keeps_no_more_than_1f1b(stages: int, microbatches: int) -> None:
    """Counted until W, each rank keeps what rank 0 of 1F1B keeps; until I, what it keeps there."""
    whole = [most_in_flight(a, freed_by="B") for a in one_f_one_b(stages, microbatches)]
    split = zb_h1(stages, microbatches)
    assert [most_in_flight(a, freed_by="I") for a in split] == whole
    assert [most_in_flight(a, freed_by="W") for a in split] == [max(whole)] * stages


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize(("stages", "rounds"), [(2, 1), (2, 4), (3, 2), (4, 3)])
def test_interleaved_zero_bubble_idles_a_third_of_1f1b(
    stages: int, rounds: int, chunks: int
) -> None:
    microbatches = stages * rounds
    name, table = "interleaved_zero_bubble", interleaved_zero_bubble(stages, microbatches, chunks)
    work = 3 * microbatches * chunks
    split = length(name, table, chunks, F=1.0, I=1.0, W=1.0) - work
    table = interleaved_1f1b(stages, microbatches, chunks)
    whole = length("interleaved_1f1b", table, chunks, F=1.0, B=2.0) - work
    assert split == stages - 1 and whole == 3 * (stages - 1)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("further", [0, 1, 4])
def test_zb_v_has_no_bubble(stages: int, further: int) -> None:
    """Rank r starts r late and then works without a pause, if F, I and W are alike."""
    microbatches = 2 * stages - 1 + further
    seconds = {kind: (1.0,) * (2 * stages) for kind in "FIW"}
    table = zb_v(stages, microbatches)
    times = time_actions(table, rank_of_stage("zb_v", stages, 2), seconds)
    for rank, row in enumerate(times):
        assert row[0][0] == rank
        assert row[-1][1] == rank + 6 * microbatches


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (2, 3), (3, 8), (4, 12)])
def test_zb_v_keeps_as_much_as_1f1b(stages: int, microbatches: int) -> None:
    """In chunks of half a stage: 2P on each rank, which is P whole stages."""
    for actions in zb_v(stages, microbatches):
        assert most_in_flight(actions, freed_by="W") == 2 * stages


def test_orders_for_one_or_two_chunks() -> None:
    with pytest.raises(ScheduleError, match="zb_h1 runs one chunk for each rank, got 2"):
        zb_h1(2, 4, 2)
    with pytest.raises(ScheduleError, match="zb_v runs two chunks for each rank, got 3"):
        zb_v(2, 4, 3)
