"""Encoder tasks inside LLM tasks: their time, where they may go, and what they compute."""

from __future__ import annotations

import dataclasses

import pytest

from optimus_jax.schedule.fuse import fuse
from optimus_jax.schedule.lower import lower
from optimus_jax.schedule.methods import schedule
from optimus_jax.schedule.program import KINDS
from optimus_jax.schedule.simulate import Durations, EncoderDurations, event_driven
from optimus_jax.schedule.task import EncoderPipeline, Kind, Pipeline, Schedule, ScheduleError, Task
from optimus_jax.schedule.validate import check_complete, validate
from tests.schedule import arithmetic

ONE = Pipeline(1, 2, llm_layers=(2,), encoders=(EncoderPipeline((3,)),))


def with_windows(durations: Durations, forward: float, backward: float) -> Durations:
    return dataclasses.replace(durations, window=(forward, backward))


def of_one(window: float) -> Durations:
    """One device: F takes 4, B 8; a layer of the encoder 1 and 2."""
    encoder = EncoderDurations((1.0,) * 3, (2.0,) * 3)
    return with_windows(Durations((4.0,), (8.0,), (encoder,)), window, 2 * window)


@pytest.mark.parametrize(
    ("task", "window", "seconds"),
    [
        ("F0", 0.5, 4),
        ("F0|EF1[0:2)", 0.0, 4 + 2),
        ("F0|EF1[0:2)", 0.25, 4 + 2 - 2 * 0.25),
        ("F0|EF1[0:1)", 0.25, 4 + 1 - 0.25),
        ("F0|EF1[0:2)", 1.0, 4),
        ("F0|EF1[0:2)", 9.0, 4),
        ("B0|EB1[1:3)", 0.25, 8 + 4 - 2 * 0.5),
        ("B0|EB1[1:3)", 9.0, 8),
    ],
)
def test_fused_tasks_hide_in_windows(task: str, window: float, seconds: float) -> None:
    assert of_one(window).of(Task.parse(task), 0, ONE) == seconds


def test_a_fused_task_is_no_shorter_than_either_part() -> None:
    encoder = EncoderDurations((5.0,) * 3, (5.0,) * 3)
    durations = with_windows(Durations((4.0,), (8.0,), (encoder,)), 4.5, 4.5)
    assert durations.of(Task.parse("F0|EF1[0:2)"), 0, ONE) == 10


BY_HAND = """
    0: EF0 F0|EF1[0:2) EF1[2:3) F1 B0 B1|EB0[1:3) EB0[0:1) EB1
"""


def test_a_schedule_with_fused_tasks_by_hand() -> None:
    found = Schedule.parse(BY_HAND, ONE)
    durations = of_one(0.25)
    program = lower(found, durations, bucket=1)
    validate(program, found)
    assert program.end(durations) == 3 + 5.5 + 1 + 4 + 8 + 11 + 2 + 6
    assert arithmetic.run(program) == arithmetic.sequential(ONE, frozenset({0, 1}))
    at = program.columns
    row = program.table[1, 0]
    assert (row[at["kind"]], row[at["e_kind"]]) == (KINDS[Kind.F], KINDS[Kind.EF])
    assert [int(row[at[n]]) for n in ("microbatch", "e_microbatch", "begin", "end")] == [0, 1, 0, 2]
    for column, value in (("e_kind", 0), ("e_kind", 4), ("e_microbatch", 0), ("kind", 0)):
        table = program.table.copy()
        table[1, 0, at[column]] = value
        with pytest.raises(ScheduleError, match="tick 1 device 0"):
            validate(dataclasses.replace(program, table=table), found)


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ("F0|EF1", "has 3 encoder layers inside 2 LLM layers; there may be as many at most"),
        ("F0|EB1[0:2)", "only an EF goes into an F"),
    ],
)
def test_fused_tasks_that_do_not_fit_are_refused(task: str, reason: str) -> None:
    rest = "EF0 {} F1 B0 B1 EB0 EB1"
    with pytest.raises(ScheduleError, match=reason):
        check_complete(Schedule.parse(f"0: {rest.format(task)}", ONE))


def test_a_unit_cannot_run_inside_the_task_that_reads_its_features() -> None:
    found = Schedule.parse("0: EF0[0:1) F0|EF0[1:3) EF1 F1 B0 B1 EB0 EB1", ONE)
    with pytest.raises(ScheduleError, match="cycle"):
        event_driven(found, of_one(0.25))


def test_tasks_move_in_where_dependencies_allow() -> None:
    """EF1 may go into F0, but not EF0; both backwards only into what follows B0."""
    found = Schedule.parse("0: EF0 F0 EF1 F1 B0 EB0 B1 EB1", ONE)
    durations = of_one(0.25)
    assert str(fuse(found, durations)) == BY_HAND.strip().replace(
        "B0 B1|EB0[1:3) EB0[0:1) EB1", "B0 EB0[2:3) B1|EB0[0:2) EB1"
    )
    before, after = (event_driven(s, durations).end for s in (found, fuse(found, durations)))
    assert before - after == 2 * 0.25 + 2 * 0.5


def test_without_windows_fusing_gains_nothing_and_filled_does_not_fuse() -> None:
    pipe = Pipeline(2, 4, llm_layers=(2, 2), encoders=(EncoderPipeline((2,)),))
    found = schedule("filled", "1f1b", pipe, Durations.uniform(pipe))
    assert not any(task.inside for order in found.orders for task in order)


PIPES = [
    Pipeline(2, 4, llm_layers=(2, 2), encoders=(EncoderPipeline((3,)),)),
    Pipeline(2, 4, 2, llm_layers=(2,) * 4, encoders=(EncoderPipeline((2, 2)),)),
    Pipeline(4, 4, llm_layers=(3,) * 4, encoders=(EncoderPipeline((2,)), EncoderPipeline((1, 1)))),
]


@pytest.mark.parametrize(
    ("pipe", "method"),
    [*((pipe, method) for pipe in PIPES for method in ("phased", "encoder_first"))]
    + [(PIPES[0], "filled")],
    ids=lambda p: p if isinstance(p, str) else f"P{p.stages} V{p.chunks}",
)
def test_fusing_lengthens_no_step_and_keeps_the_result(pipe: Pipeline, method: str) -> None:
    durations = with_windows(Durations.uniform(pipe, encoder=1.5), 0.1, 0.2)
    apart = schedule(method, "1f1b", pipe, with_windows(durations, 0, 0))
    together = fuse(apart, durations)
    assert event_driven(together, durations).end <= event_driven(apart, durations).end + 1e-9
    found = schedule(method, "1f1b", pipe, durations) if method == "filled" else together
    if method == "filled":
        ends = [lower(s, durations).end(durations) for s in (found, apart)]
        assert ends[0] <= ends[1] + 1e-9
    program = lower(found, durations, bucket=1)
    validate(program, found)
    assert arithmetic.run(program) == arithmetic.sequential(pipe, found.encoded)


def test_encoder_first_hides_most() -> None:
    """All encoder work stands beside LLM tasks of the first stage, which is never idle."""
    pipe = Pipeline(1, 4, llm_layers=(2,), encoders=(EncoderPipeline((2,)),))
    durations = with_windows(Durations.uniform(pipe, encoder=1.0), 0.25, 0.5)
    found = schedule("encoder_first", "1f1b", pipe, durations)
    fused = fuse(found, durations)
    assert sum(task.inside is not None for task in fused.orders[0]) > 0
    assert event_driven(fused, durations).end < event_driven(found, durations).end


def test_the_cap_is_kept() -> None:
    pipe = dataclasses.replace(ONE, cap=1)
    found = Schedule.parse("0: EF0 F0 B0 EB0 EF1 F1 B1 EB1", pipe)
    check_complete(found)
    fused = fuse(found, of_one(0.25))
    check_complete(fused)
    assert not fused.orders[0][1].inside
