"""`filled` against stored optima of small pipelines, and the solver that found them."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import random
import statistics
import sys
from fractions import Fraction

import pytest

from optimus_jax.errors import UserError
from optimus_jax.judge import __main__ as judge
from optimus_jax.judge.instances import (
    COUNT,
    MEAN_ABOVE,
    WORST_ABOVE,
    Instance,
    Optimum,
    draw,
    fill,
    load,
    store,
)
from optimus_jax.judge.solver import solve
from optimus_jax.schedule.filled import lower_bound
from optimus_jax.schedule.methods import phased
from optimus_jax.schedule.simulate import event_driven
from optimus_jax.schedule.task import Schedule
from optimus_jax.schedule.validate import check_complete
from tests.conftest import RunHere

OPTIMA = load()
THIRD = random.Random(0).sample(OPTIMA, COUNT // 3)
SMALL = Instance(2, 4, 1, 2, 0.5, 2)


@functools.cache
def filled_end(instance: Instance) -> float:
    return event_driven(fill(instance), instance.durations).end


def check(optimum: Optimum) -> None:
    end = filled_end(optimum.instance)
    assert end >= optimum.bound - 1e-6, "shorter than possible"
    assert optimum.above(end) <= WORST_ABOVE


def mean_above(optima: list[Optimum]) -> float:
    return statistics.mean(o.above(filled_end(o.instance)) for o in optima)


@pytest.mark.parametrize("optimum", THIRD, ids=lambda o: str(o.instance))
def test_filled_is_near_the_optimum(optimum: Optimum) -> None:
    check(optimum)


def test_filled_is_nearer_to_it_on_average() -> None:
    assert mean_above(THIRD) <= MEAN_ABOVE


@pytest.mark.slow
def test_filled_is_near_the_optimum_of_every_instance() -> None:
    assert len(OPTIMA) == COUNT
    for optimum in OPTIMA:
        check(optimum)
    assert mean_above(OPTIMA) <= MEAN_ABOVE


def test_the_stored_instances_are_those_drawn() -> None:
    assert [optimum.instance for optimum in OPTIMA] == draw()
    assert draw(seed=1) != draw()


def test_instances_cover_the_ranges_and_differ() -> None:
    drawn = draw()
    assert len(set(drawn)) == COUNT == 60
    for name, wanted in (
        ("stages", {2, 3, 4}),
        ("microbatches", {4, 5, 6, 7, 8}),
        ("chunks", {1, 2}),
        ("units", {1, 2, 3, 4}),
        ("encoder", {k / 4 for k in range(1, 9)}),
        ("backward", {2, 3}),
    ):
        assert {getattr(instance, name) for instance in drawn} == wanted, name
    for instance in drawn:
        assert instance.units <= instance.stages
        assert instance.chunks == 1 or instance.microbatches % instance.stages == 0


@pytest.mark.parametrize("optimum", OPTIMA, ids=lambda o: str(o.instance))
def test_stored_schedules_take_the_stored_times(optimum: Optimum) -> None:
    instance, schedule = optimum.instance, optimum.schedule
    check_complete(schedule)
    assert schedule.encoded == set(range(instance.microbatches))
    for order, llm in zip(schedule.orders, instance.llm, strict=True):
        assert tuple(t for t in order if not t.kind.is_encoder) == llm
    assert event_driven(schedule, instance.durations).end == pytest.approx(optimum.best, abs=1e-6)
    simple = lower_bound(instance.llm, instance.pipe, instance.durations)
    assert simple - 1e-6 <= optimum.bound <= optimum.best + 1e-6


@pytest.mark.parametrize(
    ("instance", "quantum"),
    [
        (Instance(2, 4, 1, 1, 2.0, 2), Fraction(1)),
        (Instance(3, 4, 1, 3, 2.0, 3), Fraction(1, 3)),
        (Instance(2, 4, 2, 1, 2.0, 3), Fraction(1, 2)),
        (Instance(4, 8, 2, 3, 0.25, 2), Fraction(1, 12)),
    ],
    ids=str,
)
def test_every_duration_is_a_multiple_of_the_quantum(instance: Instance, quantum: Fraction) -> None:
    assert instance.quantum == quantum
    times = instance.durations
    (encoder,) = times.encoders
    for rows in (times.forward, times.backward, encoder.forward, encoder.backward):
        for time in rows:
            assert time / float(quantum) == pytest.approx(round(time / float(quantum)))


def optimum(best: float, bound: float) -> Optimum:
    return Optimum(SMALL, best, bound, 1.0, Schedule(SMALL.pipe, SMALL.llm))


def test_an_optimum_is_the_reference_and_else_the_bound() -> None:
    known, unknown = optimum(10, 10), optimum(10, 8)
    assert known.proven and known.above(10.5) == pytest.approx(5)
    assert not unknown.proven and unknown.above(10) == pytest.approx(25)


def test_two_searches_together_know_the_best_of_both() -> None:
    both = optimum(10, 9).combined(dataclasses.replace(optimum(11, 9.5), solver_s=3.0))
    assert (both.best, both.bound, both.solver_s) == (10, 9.5, 3.0)


def test_optima_are_stored_and_loaded(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "optima.json"
    assert load(path) == []
    store(OPTIMA[:3], path)
    assert load(path) == OPTIMA[:3]
    assert [p.name for p in tmp_path.iterdir()] == ["optima.json"]


def test_the_command_tells_the_gap(run_here: RunHere, monkeypatch: pytest.MonkeyPatch) -> None:
    known = optimum(15.75, 15.75)
    monkeypatch.setattr(judge, "load", lambda: [known, dataclasses.replace(known, bound=15.0)])
    done = run_here(judge.main)
    rows = [line.split() for line in done.out.splitlines() if line.startswith("  P2")]
    assert [row[-4:] for row in rows] == [
        ["15.750", "0.00", "%", "optimum"],
        ["15.000", "5.00", "%", "bound"],
    ]
    assert "2 instances, 1 optima proven" in done.out
    assert "mean 2.50 % (at most 2 wanted), worst 5.00 % (at most 6)" in done.out
    assert done.code == 1


def test_the_command_says_how_to_get_the_solver(
    run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge, "load", list)
    monkeypatch.setattr(judge, "draw", lambda: [SMALL])
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    done = run_here(judge.main, "--solve")
    assert (done.code, done.err) == (2, "--solve needs the solver CP-SAT: pip install ortools\n")


def test_without_optima_there_is_nothing_to_compare(
    run_here: RunHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge, "load", list)
    done = run_here(judge.main)
    assert done.code == 2 and "--solve finds them" in done.err


@pytest.mark.parametrize(
    ("instance", "best"),
    [
        (Instance(2, 4, 1, 1, 0.5, 2), 16.5),
        (Instance(2, 4, 1, 2, 0.5, 2), 15.75),
        (Instance(2, 4, 1, 1, 2.0, 2), 25),
        (Instance(2, 8, 1, 2, 0.5, 2), 30.25),
    ],
    ids=str,
)
def test_the_solver_finds_known_optima(instance: Instance, best: float) -> None:
    """From a far longer schedule; the second lies at the simple lower bound, the others above."""
    pytest.importorskip("ortools")
    start = phased(instance.llm, instance.pipe, instance.durations)
    assert event_driven(start, instance.durations).end > best
    found = solve(instance, start, 20)
    check_complete(found.schedule)
    assert found.proven and found.best == pytest.approx(best)


def test_solving_again_takes_only_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    pytest.importorskip("ortools")
    path, other = tmp_path / "optima.json", Instance(2, 4, 1, 1, 0.5, 2)
    monkeypatch.setattr(judge, "load", lambda: load(path))
    monkeypatch.setattr(judge, "store", lambda optima: store(optima, path))
    monkeypatch.setattr(judge, "draw", lambda: [SMALL])
    assert len(list(judge.solved(20))) == 1
    monkeypatch.setattr(judge, "draw", lambda: [other, SMALL])
    (line,) = judge.solved(20)
    assert line.startswith("P2 M4 V1 units 1 e 0.5 B 2: best 16.500, bound 16.500, ")
    assert [o.instance for o in load(path)] == [other, SMALL]
    store([dataclasses.replace(o, bound=15.0, solver_s=5.0) for o in load(path)], path)
    assert list(judge.solved(5)) == []
    assert len(list(judge.solved(20))) == 2
    assert all(o.proven for o in load(path))


def test_the_solver_refuses_with_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(UserError, match="pip install ortools"):
        solve(SMALL, fill(SMALL), 1)
