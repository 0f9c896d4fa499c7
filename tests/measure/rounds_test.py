"""Timings by turns, and their spread."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

from optimus_jax.measure.rounds import Spread, by_turns, ratio


@pytest.mark.parametrize(
    ("figures", "median", "iqr"),
    [
        ([3.0], 3, 0),
        ([1, 3], 2, 1),
        ([5, 1, 3], 3, 2),
        ([4, 1, 3, 2], 2.5, 1.5),  # quartiles 1.75 and 3.25
        ([1, 1, 1, 1, 100], 1, 0),
        (list(range(101)), 50, 50),
    ],
)
def test_spread_by_hand(figures: list[float], median: float, iqr: float) -> None:
    assert Spread.of(figures) == Spread(median, iqr, len(figures))
    assert Spread.of(x for x in figures) == Spread.of(figures), "any iterable will do"


class Diary:
    """Runs that note their names; the n-th run of all takes n seconds."""

    def __init__(self, names: str):
        self.ran: list[str] = []
        self.runs: dict[str, Callable[[], float]] = {name: self._of(name) for name in names}

    def _of(self, name: str) -> Callable[[], float]:
        def run() -> float:
            self.ran.append(name)
            return float(len(self.ran))

        return run


def test_the_first_one_changes_from_round_to_round_and_the_warm_up_does_not_count() -> None:
    diary = Diary("abc")
    found = by_turns(diary.runs, 4)
    assert "".join(diary.ran) == "abc" + "abc" + "bca" + "cab" + "abc"
    assert found == {"a": [4, 9, 11, 13], "b": [5, 7, 12, 14], "c": [6, 8, 10, 15]}


def test_every_name_runs_once_in_each_round_and_comes_first_equally_often() -> None:
    diary = Diary("abcde")
    found = by_turns(diary.runs, 10)
    rounds = [diary.ran[k : k + 5] for k in range(5, 55, 5)]
    assert all(sorted(names) == list("abcde") for names in rounds)
    assert sorted(names[0] for names in rounds) == sorted("abcde" * 2)
    assert {name: len(times) for name, times in found.items()} == dict.fromkeys("abcde", 10)


def test_no_round_is_interrupted_by_the_garbage_collector() -> None:
    seen: list[bool] = []

    def run() -> float:
        seen.append(gc.isenabled())
        if len(seen) == 3:
            raise RuntimeError("broken")
        return 0.0

    with pytest.raises(RuntimeError, match="broken"):
        by_turns({"a": run}, 5)
    assert seen[1:] == [False, False]
    assert gc.isenabled(), "on again whatever happens"


def test_ratios_are_taken_within_rounds() -> None:
    """Both slow down together from round to round; their ratio does not change."""
    assert ratio([2, 4, 20], [1, 2, 10]) == Spread(2, 0, 3)
    # per round 4, 0.5, 1; the medians alone would say 3 / 2
    assert ratio([4, 1, 3], [1, 2, 3]) == Spread(1, 1.75, 3)
    with pytest.raises(ValueError, match="shorter"):
        ratio([1, 2], [1])
