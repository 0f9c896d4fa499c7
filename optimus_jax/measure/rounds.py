"""Timings by turns: what is compared runs in the same rounds, and ratios are taken by round."""

from __future__ import annotations

import dataclasses
import gc
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median and interquartile range of some figures, and how many they are."""

    median: float
    iqr: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        values = list(values)
        if len(values) < 2:
            return cls(values[0], 0.0, len(values))
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(statistics.median(values), high - low, len(values))


Timings = dict[str, list[float]]  # by name, the seconds of each round


def by_turns(runs: Mapping[str, Callable[[], float]], rounds: int) -> Timings:
    """Each of `runs` once in every round, after one more round that does not count. Who comes first
    changes from round to round, so none always follows the same other."""
    names = list(runs)
    found: Timings = {name: [] for name in names}
    for name in names:
        runs[name]()
    gc.collect()
    gc.disable()
    try:
        for r in range(rounds):
            first = r % len(names)
            for name in names[first:] + names[:first]:
                found[name].append(runs[name]())
    finally:
        gc.enable()
    return found


def ratio(above: Sequence[float], below: Sequence[float]) -> Spread:
    """Of the ratios within each round."""
    return Spread.of(a / b for a, b in zip(above, below, strict=True))
