"""The coarse schedule: its form, its known times, and its search against enumeration."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator

import pytest

from optimus_jax.schedule.coarse import coarse
from optimus_jax.schedule.dependency import order_globally
from optimus_jax.schedule.pipeline import ORDERS, one_f_one_b
from optimus_jax.schedule.simulate import Durations, event_driven
from optimus_jax.schedule.task import Kind, Orders, Pipeline, Schedule, Task


def test_encoder_work_stands_at_both_ends() -> None:
    pipe = Pipeline(2, 4)
    schedule = coarse(one_f_one_b(pipe), pipe, Durations.uniform(pipe, encoder=0.5))
    expected = """
        0: EF0 F0 F1 B0 F2 B1 F3 B2 B3 EB0
        1: EF1 EF2 EF3 F0 B0 F1 B1 F2 B2 F3 B3 EB1 EB2 EB3
    """
    assert str(schedule) == textwrap.dedent(expected).strip()


@pytest.mark.parametrize("encoder", [0.25, 1.0, 2.0])
@pytest.mark.parametrize("sizes", [(1, 2), (2, 3), (4, 6), (2, 4, 2)], ids=str)
def test_tasks_are_whole_and_backwards_run_where_forwards_ran(
    sizes: tuple[int, ...], encoder: float
) -> None:
    pipe = Pipeline(*sizes)
    llm = one_f_one_b(pipe)
    schedule = coarse(llm, pipe, Durations.uniform(pipe, encoder=encoder))
    for order, own in zip(schedule.orders, llm, strict=True):
        kinds = [task.kind for task in order]
        forwards, backwards = kinds.count(Kind.EF), kinds.count(Kind.EB)
        assert kinds[:forwards] == [Kind.EF] * forwards
        assert order[forwards : len(order) - backwards] == own
        assert {t.microbatch for t in order[:forwards]} == {
            t.microbatch for t in order[len(order) - backwards :]
        }
        assert all(not task.units and not task.layers for task in order)


@pytest.mark.parametrize(
    ("stages", "microbatches", "encoder", "end"), [(2, 4, 0.5, 16.5), (2, 4, 1, 21), (4, 8, 1, 36)]
)
def test_known_times(stages: int, microbatches: int, encoder: float, end: float) -> None:
    pipe = Pipeline(stages, microbatches)
    durations = Durations.uniform(pipe, encoder=encoder)
    assert event_driven(coarse(one_f_one_b(pipe), pipe, durations), durations).end == end


def _shares(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    return (s for s in itertools.product(range(total + 1), repeat=parts) if sum(s) == total)


def _with_shares(llm: Orders, pipe: Pipeline, d: Durations, shares: tuple[int, ...]) -> float:
    """The time when device k encodes `shares[k]` microbatches, in the best assignment of names."""
    names = iter(range(pipe.microbatches))
    mine = [[next(names) for _ in range(n)] for n in shares]
    orders = tuple(
        tuple(Task(Kind.EF, i) for i in m) + order + tuple(Task(Kind.EB, i) for i in m)
        for m, order in zip(mine, llm, strict=True)
    )
    schedule = Schedule(pipe, orders)
    return event_driven(order_globally(schedule, event_driven(schedule, d)), d).end


@pytest.mark.parametrize("encoder", [0.25, 0.5, 1.0, 2.0, 3.0])
@pytest.mark.parametrize(
    "case",
    [("1f1b", 2, 5), ("gpipe", 2, 4), ("1f1b", 3, 8), ("gpipe", 4, 5), ("1f1b", 2, 4, 2)],
    ids=str,
)
def test_search_finds_the_best_partition(
    case: tuple[str, *tuple[int, ...]], encoder: float
) -> None:
    name, *sizes = case
    pipe = Pipeline(*sizes)
    llm, durations = ORDERS[name](pipe), Durations.uniform(pipe, encoder=encoder)
    best = min(
        _with_shares(llm, pipe, durations, shares)
        for shares in _shares(pipe.microbatches, pipe.stages)
    )
    assert event_driven(coarse(llm, pipe, durations), durations).end <= best + 1e-9
