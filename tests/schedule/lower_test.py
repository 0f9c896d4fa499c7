"""Programs as pictures, what they compute, their ticks, and the slots they get."""

from __future__ import annotations

import dataclasses
import random
import textwrap

import numpy as np
import pytest

from optimus_jax.schedule.exchange import place_exchanges
from optimus_jax.schedule.lower import lower
from optimus_jax.schedule.program import EncoderSlots, Slots
from optimus_jax.schedule.simulate import Durations, EncoderDurations
from optimus_jax.schedule.task import EncoderPipeline, Pipeline, Schedule, ScheduleError
from optimus_jax.schedule.validate import validate
from tests.schedule import arithmetic
from tests.schedule.pictures import picture
from tests.schedule.planned import planned
from tests.schedule.random_schedules import random_schedule

PROGRAMS = {
    "0: F0 F1 B0 F2 B1 B2 / 1: F0 B0 F1 B1 F2 B2": """
        F0         .          | 0>1
        F1         F0         | 0>1
        .          B0         | 1>0
        B0         F1         |
        F2         B1         | 0>1 1>0
        B1         F2         |
        .          B2         | 1>0
        B2         .          |
    """,
    "0: EF0 F0 F1 B0 B1 EB0 / 1: EF1 F0 B0 F1 B1 EB1": """
        EF0        EF1        |
        F0         .          | 1>0:2
        .          .          | 0>1
        F1         F0         | 0>1
        .          B0         | 1>0
        B0         F1         |
        .          B1         | 1>0
        B1         .          | 0>1:2
        EB0        EB1        |
    """,
    "0: F0 F1 F0c1 F1c1 B0c1 B1c1 B0 B1 / 1: F0 F1 F0c1 B0c1 F1c1 B1c1 B0 B1": """
        F0         .          | 0>1
        F1         F0         | 0>1 1>0
        F0c1       F1         | 0>1 1>0
        F1c1       F0c1       | 0>1
        .          B0c1       | 1>0
        B0c1       F1c1       |
        .          B1c1       | 0>1 1>0
        B1c1       B0         | 0>1 1>0
        B0         B1         | 1>0
        B1         .          |
    """,
    "0: EF0.0[0:1) EF0.0[1:3) F0 F1 B0 EB0.0[2:3) B1 EB0.0[0:2)"
    " / 1: EF0.1 F0 B0 F1 EB0.1[1:3) EB0.1[0:1) B1": """
        EF0.0[0:1) EF0.1      |
        EF0.0[1:3) .          | 1>0:1
        F0         .          | 0>1
        F1         F0         | 0>1
        .          B0         | 1>0
        B0         F1         | 0>1:1
        EB0.0[2:3) EB0.1[1:3) |
        .          EB0.1[0:1) |
        .          B1         | 1>0
        B1         .          |
        EB0.0[0:2) .          |
    """,
}


@pytest.mark.parametrize(("orders", "expected"), PROGRAMS.items())
def test_programs_look_like_their_pictures(orders: str, expected: str) -> None:
    text = orders.replace(" / ", "\n")
    chunks = 2 if "c1" in text else 1
    pipe = Pipeline(2, 3 if "F2" in text else 2, chunks, encoders=(EncoderPipeline((3,)),))
    schedule = Schedule.parse(text, pipe)
    program = lower(schedule, Durations.uniform(pipe), bucket=1)
    validate(program, schedule)
    assert picture(program) == textwrap.dedent(expected).strip()


@pytest.mark.parametrize(
    "case",
    [
        *(("encoder_first", "gpipe", 2, 5, 1), ("phased", "1f1b", 4, 9, 1)),
        *(("coarse", "1f1b", 4, 4, 2), ("filled", "1f1b", 2, 5, 1), ("filled", "1f1b", 4, 4, 2)),
    ],
    ids=str,
)
def test_programs_of_methods_compute_the_sequential_result(
    case: tuple[str, str, int, int, int],
) -> None:
    found = planned(*case, 0.5)
    expected = arithmetic.sequential(found.schedule.pipeline, found.schedule.encoded)
    assert arithmetic.run(found.program) == expected


PIPES = [
    Pipeline(1, 2, encoders=(EncoderPipeline((3,)),)),
    Pipeline(2, 3, encoders=(EncoderPipeline((3,)),), llm_layers=(3, 2)),
    Pipeline(2, 2, chunks=3, encoders=(EncoderPipeline((3,)),)),
    Pipeline(3, 3, chunks=2, encoders=(EncoderPipeline((3,), 2),)),
    Pipeline(4, 3, encoders=(EncoderPipeline((3,)),)),
]


@pytest.mark.parametrize("pipe", PIPES, ids=lambda p: f"P{p.stages} M{p.microbatches} V{p.chunks}")
def test_random_schedules_lower_validate_and_compute_the_sequential_result(pipe: Pipeline) -> None:
    durations = Durations.uniform(pipe, encoder=0.7)
    for seed in range(30):
        encoded = [0] if seed % 3 == 2 else None
        schedule = random_schedule(pipe, random.Random(seed), encoded)
        program = lower(schedule, durations, bucket=1)
        validate(program, schedule)
        expected = arithmetic.sequential(pipe, schedule.encoded)
        assert arithmetic.run(program) == expected, schedule


@pytest.mark.parametrize("transfer", [0.0, 0.1])
def test_uneven_durations_lower_to_valid_programs(transfer: float) -> None:
    pipe = Pipeline(3, 3, encoders=(EncoderPipeline((2,)),))
    for seed in range(10):
        rng = random.Random(seed)
        forward, backward, *encoder = (
            tuple(rng.uniform(0.1, 2) for _ in range(n)) for n in (3, 3, 2, 2)
        )
        durations = Durations(forward, backward, (EncoderDurations(*encoder),), transfer=transfer)
        schedule = random_schedule(pipe, rng)
        program = lower(schedule, durations)
        validate(program, schedule)
        rendezvous = place_exchanges(schedule, durations).timing(durations).end
        assert program.end(durations) >= rendezvous - 1e-9


@pytest.mark.parametrize(("bucket", "ticks"), [(1, 8), (3, 9), (8, 8), (32, 32)])
def test_ticks_fill_buckets(bucket: int, ticks: int) -> None:
    found = planned("text_only", "1f1b", 2, 3, 1, 0.5)
    program = lower(found.schedule, found.durations, bucket=bucket)
    assert (program.ticks, len(program.pattern)) == (ticks, ticks)
    assert (program.table.dtype, program.pattern.dtype) == (np.int32, np.int32)
    assert (program.table[8:] == program.columns.idle_row()).all()
    assert not program.pattern[8:].any()
    assert program.end(found.durations) == 12
    validate(program, found.schedule)


@pytest.mark.parametrize(("stages", "microbatches", "most"), [(2, 4, 10), (4, 8, 26), (6, 6, 30)])
def test_links_share_ticks(stages: int, microbatches: int, most: int) -> None:
    """With six stages a tick may use part of a pattern, if its other links keep nobody waiting."""
    assert planned("text_only", "1f1b", stages, microbatches, 1, 0.5).program.ticks <= most


def test_lowering_twice_gives_the_same_tables() -> None:
    found = planned("filled", "1f1b", 2, 4, 1, 0.5)
    again = lower(found.schedule, found.durations, bucket=1)
    assert (again.table == found.program.table).all()
    assert (again.pattern == found.program.pattern).all()


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (2, 4), (4, 4), (4, 9)])
def test_saved_states_are_those_in_flight(stages: int, microbatches: int) -> None:
    few = planned("text_only", "1f1b", stages, microbatches, 1, 0.5).program
    assert few.slots.saved == min(stages, microbatches)
    assert planned("text_only", "gpipe", stages, microbatches, 1, 0.5).program.slots.saved == (
        microbatches
    )
    assert few.slots.encoders == (EncoderSlots(),)


def test_caps_become_the_slots_of_the_program() -> None:
    found = planned("phased", "1f1b", 2, 4, 1, 0.5)
    caps = Slots(9, 9, (EncoderSlots(9, 9, 9),))
    program = lower(found.schedule, found.durations, caps)
    assert program.slots == caps
    validate(program, found.schedule)
    exact = lower(found.schedule, found.durations, found.program.slots)
    assert exact.slots == found.program.slots


def one_less(slots: Slots, pool: str) -> Slots:
    """With one slot fewer in a pool."""
    if pool in ("wire", "saved"):
        return dataclasses.replace(slots, **{pool: slots.of(pool) - 1})
    name = "saved" if pool == "encoder" else pool
    encoder = dataclasses.replace(slots.encoders[0], **{name: slots.of(pool) - 1})
    return dataclasses.replace(slots, encoders=(encoder,))


@pytest.mark.parametrize("kind", ["wire", "feature", "saved", "encoder"])
def test_caps_too_small_are_refused(kind: str) -> None:
    found = planned("phased", "1f1b", 2, 4, 1, 0.5)
    needed = found.program.slots
    short = one_less(needed, kind)
    with pytest.raises(ScheduleError) as refused:
        lower(found.schedule, found.durations, short)
    number = needed.of(kind)
    assert f"needs {kind} slot {number}, the plan has {number - 1}; live: " in str(refused.value)
    assert str(refused.value).startswith("tick ")
    assert " device " in str(refused.value)


@pytest.mark.parametrize(
    "orders",
    [
        pytest.param("0: EF0 F0 B0 / 1: F0 B0 EB0", id="backward on another device"),
        pytest.param("0: EF0 F0 B0 EB0.0 / 1: F0 B0 EB0.1", id="half of it on another device"),
    ],
)
def test_backwards_away_from_their_forwards_are_refused(orders: str) -> None:
    pipe = Pipeline(2, 1)
    schedule = Schedule.parse(orders.replace(" / ", "\n"), pipe)
    with pytest.raises(ScheduleError, match="EB0"):
        lower(schedule, Durations.uniform(pipe))


@pytest.mark.parametrize(
    "orders",
    [
        pytest.param("0: EF0.0+1 F0 B0 EB0 / 1: F0 B0", id="all units by name"),
        pytest.param("0: EF0 F0 B0 EB0[0:1) / 1: F0 B0", id="all layers by name"),
    ],
)
def test_long_forms_of_tasks_are_valid(orders: str) -> None:
    pipe = Pipeline(2, 1)
    schedule = Schedule.parse(orders.replace(" / ", "\n"), pipe)
    validate(lower(schedule, Durations.uniform(pipe)), schedule)
