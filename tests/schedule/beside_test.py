"""Encoder tasks beside the collectives over replicas: rows around the ticks, and their time."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest

from optimus_jax.schedule.lower import lower
from optimus_jax.schedule.methods import schedule
from optimus_jax.schedule.program import NONE, Program, fit_together
from optimus_jax.schedule.simulate import Durations, event_driven
from optimus_jax.schedule.task import EncoderPipeline, Pipeline, Schedule, ScheduleError
from optimus_jax.schedule.validate import validate
from tests.schedule import arithmetic
from tests.schedule.random_schedules import random_schedule

PIPE = Pipeline(2, 2)
SCHEDULE = Schedule.parse(
    """
    0: EF0.0 EF1 F0 F1 B0 B1 EB0.0 EB1
    1: EF0.1 F0 B0 F1 EB0.1 B1
    """,
    PIPE,
)


def durations_of(gather: float, scatter: float, overlap: bool, pipe: Pipeline = PIPE) -> Durations:
    """F = 1, B = 2, a microbatch's encoder forward 1 and backward 2."""
    return dataclasses.replace(
        Durations.uniform(pipe), gather=gather, scatter=scatter, overlap=overlap
    )


def rows(program: Program, part: str) -> list[list[str]]:
    """The tasks of prologue or epilogue by device."""
    count = len(getattr(program, part))
    tasks = ([program.task_beside(part, k, d) for k in range(count)] for d in range(2))
    return [[str(task) for task in column if task] for column in tasks]


@pytest.mark.parametrize(
    ("gather", "expected"),
    [
        (0.0, [[], []]),
        (0.4, [[], []]),
        (0.5, [["EF0.0"], ["EF0.1"]]),
        (1.4, [["EF0.0"], ["EF0.1"]]),
        (1.5, [["EF0.0", "EF1"], ["EF0.1"]]),
        (9.0, [["EF0.0", "EF1"], ["EF0.1"]]),
    ],
)
@pytest.mark.parametrize("overlap", [False, True])
def test_leading_forwards_go_beside_the_gathering(
    gather: float, expected: list[list[str]], overlap: bool
) -> None:
    program = lower(SCHEDULE, durations_of(gather, 0, overlap))
    assert rows(program, "prologue") == expected
    assert len(program.prologue) == (4 if any(expected) else 0)
    validate(program, SCHEDULE)


@pytest.mark.parametrize(
    ("scatter", "expected"),
    [(0.0, [[], []]), (1.9, [[], []]), (2.0, [["EB1"], []]), (3.0, [["EB0.0", "EB1"], []])],
)
def test_trailing_backwards_go_beside_the_scattering(
    scatter: float, expected: list[list[str]]
) -> None:
    """Device 1 ends with an LLM task."""
    program = lower(SCHEDULE, durations_of(0, scatter, True))
    assert rows(program, "epilogue") == expected
    assert len(program.epilogue) == (4 if any(expected) else 0)
    validate(program, SCHEDULE)
    assert arithmetic.run(program) == arithmetic.sequential(PIPE, frozenset({0, 1}))


@pytest.mark.parametrize(
    ("gather", "scatter", "overlap", "end"),
    [
        # F0 at 1.5 to 2.5, then on device 1 until 3.5, B0 5.5, F1 6.5, meanwhile B0 on device 0
        # until 7.5, EB0.1 8.5, B1 10.5, on device 0 12.5, EB0.0 and EB1 15.5
        (0, 0, False, 15.5),
        # collectives without overlap only come on top
        (2, 4, False, 21.5),
        # F0 starts at 2 and not at 1.5; EB run while 4 pass after B1
        (2, 4, True, 17),
        # the prologue takes EF0.0 alone, EF1 follows in a tick: F0 starts at 1.25 + 1
        (1.25, 0, True, 16.25),
        (1.25, 3, True, 16.25),
    ],
)
def test_times_by_hand(gather: float, scatter: float, overlap: bool, end: float) -> None:
    durations = durations_of(gather, scatter, overlap)
    program = lower(SCHEDULE, durations)
    assert program.end(durations) == pytest.approx(end)
    assert event_driven(SCHEDULE, durations).end == pytest.approx(end)
    timed = program.time(durations)
    assert [[str(t) for t, _, _ in row] for row in timed] == [
        list(map(str, order)) for order in SCHEDULE.orders
    ]
    for row in timed:
        assert all(a[2] <= b[1] + 1e-9 for a, b in itertools.pairwise(row))


def test_forwards_that_wait_for_another_stage_are_no_prologue() -> None:
    pipe = Pipeline(2, 1, encoders=(EncoderPipeline((1, 1)),))
    found = Schedule.parse("0: EF0 F0 B0 EB0\n1: EF0 F0 B0 EB0", pipe)
    program = lower(found, durations_of(9, 9, True, pipe))
    assert rows(program, "prologue") == [["EF0"], []]
    assert rows(program, "epilogue") == [["EB0"], []]
    validate(program, found)
    assert arithmetic.run(program) == arithmetic.sequential(pipe, frozenset({0}))


def beside() -> Program:
    return lower(SCHEDULE, durations_of(2, 4, True))


def test_damaged_rows_are_refused() -> None:
    program, at = beside(), beside().columns

    def refused(part: str, row: int, device: int, column: str, value: object) -> str:
        table = getattr(program, part).copy()
        table[row, device, at[column]] = value
        with pytest.raises(ScheduleError) as error:
            validate(dataclasses.replace(program, **{part: table}), SCHEDULE)
        return str(error.value)

    assert refused("prologue", 0, 0, "e_kind", 0) == (
        "prologue row 1 device 0: EF1 runs where the schedule has EF0.0"
    )
    assert refused("prologue", 1, 1, "e_send", [0, NONE]) == (
        "prologue row 1 device 1 sends or receives, but has no exchange"
    )
    assert (
        refused("prologue", 2, 1, "kind", 1) == "prologue row 2 device 1: F0 is no encoder forward"
    )
    assert refused("epilogue", 0, 0, "unit", [1, 0]) == (
        "epilogue row 0 device 0: EB0.1 runs where the schedule has EB0.0"
    )
    assert refused("epilogue", 0, 0, "e_saved", [2, NONE]).startswith(
        "epilogue row 0 device 0: expected saved state of microbatch 0 unit 0 in encoder slot 2"
    )


def test_shapes_with_rows_fit_together() -> None:
    with_rows, without = beside(), lower(SCHEDULE, durations_of(0, 0, False), bucket=1)
    assert (with_rows.shape.prologue, with_rows.shape.epilogue) == (4, 4)
    both = fit_together([with_rows, without])
    assert both[0].shape == both[1].shape
    for program in both:
        validate(program, SCHEDULE)
        assert program.prologue.dtype == program.epilogue.dtype == np.int32
    with pytest.raises(ScheduleError, match="does not fit the shape"):
        with_rows.padded(with_rows.ticks, with_rows.slots, 0, 4)
    again = without.padded(*with_rows.shape)
    assert again.shape == with_rows.shape


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_random_schedules_keep_their_time_and_result(seed: int, overlap: bool) -> None:
    rng = random.Random(seed)
    pipe = Pipeline(3, 3, encoders=(EncoderPipeline((3,)),))
    found = random_schedule(pipe, rng)
    durations = durations_of(rng.uniform(0, 2), rng.uniform(0, 4), overlap, pipe)
    program = lower(found, durations, bucket=1)
    validate(program, found)
    assert arithmetic.run(program) == arithmetic.sequential(pipe, found.encoded)
    ideal = event_driven(found, durations).end
    assert ideal - 1e-9 <= program.end(durations) <= 1.3 * ideal


@pytest.mark.parametrize("method", ["text_only", "encoder_first", "phased", "filled"])
def test_methods_gain_from_overlap(method: str) -> None:
    pipe = Pipeline(2, 4)
    ends = {}
    for overlap in (False, True):
        durations = durations_of(1.0, 2.0, overlap, pipe)
        found = schedule(method, "1f1b", pipe, durations)
        program = lower(found, durations)
        validate(program, found)
        ends[overlap] = program.end(durations)
        assert ends[overlap] == pytest.approx(event_driven(found, durations).end, rel=0.03)
    assert ends[True] <= ends[False]
    if method in ("phased", "filled"):
        assert ends[True] < ends[False] - 1
