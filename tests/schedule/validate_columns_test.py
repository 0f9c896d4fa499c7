"""Every cell of a Program is either never read by its task or cannot be changed unnoticed."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import pytest

from optimus_jax.schedule.lower import lower
from optimus_jax.schedule.program import NONE, Columns, Program, alphabet
from optimus_jax.schedule.simulate import Durations
from optimus_jax.schedule.task import EncoderPipeline, Kind, Pipeline, Schedule, ScheduleError
from optimus_jax.schedule.validate import validate
from tests.schedule import arithmetic
from tests.schedule.random_schedules import random_schedule

COLUMNS = Columns.NAMES

# Columns that no task of the kind reads; None is an idle row. Those of the exchange always count.
_OF_LLM = ("microbatch", "chunk", "layers", "first", "last", "saved", "read", "write", "feature")
_OF_ENCODER = (
    *("encoder", "e_microbatch", "count", "begin", "end", "embeds", "projects"),
    *("unit", "e_saved", "e_read", "e_write"),
)


def is_unread(program: Program, tick: int, device: int, column: str, entry: int) -> bool:
    """Also those that only some tasks of a kind read."""
    task, row, at = program.task(tick, device), program.table[tick, device], program.columns
    llm, encoder = (task.llm_part, task.encoder_part) if task else (None, None)
    if column in _OF_ENCODER:
        if encoder is None or (column in Columns.VECTORS and entry >= row[at["count"]]):
            return True
        pipe, k = program.pipeline, encoder.encoder
        first, last = pipe.stage_layers(k, device)
        top, bottom = (
            row[at["end"]] == last - first,
            row[at["begin"]] == 0 and not row[at["embeds"]],
        )
        below, above = ("e_read", "e_write") if encoder.kind == Kind.EF else ("e_write", "e_read")
        return (column == below and not bottom) or (column == above and not top)
    if column in _OF_LLM:
        if llm is None:
            return True
        first_reads_features = {Kind.F: "read", Kind.B: "write"}[llm.kind]
        return column == (first_reads_features if row[at["first"]] else "feature")
    return False


def other_values(program: Program, column: str, old: int) -> list[int]:
    """Values that look possible in a column, and for a slot one that is too large."""
    pipe, slots = program.pipeline, program.slots
    units = max(encoder.units for encoder in pipe.encoders)
    sizes = {
        "kind": 4,
        "e_kind": 4,
        "unit": units,
        "count": units,
        "encoder": len(pipe.encoders) - 1,
    }
    sizes |= dict.fromkeys(("microbatch", "e_microbatch"), pipe.microbatches)
    if column in sizes or column not in Columns.SLOTS:
        least = 1 if column == "count" else 0
        return [value for value in range(least, sizes.get(column, 3) + 1) if value != old]
    encoders = slots.encoders
    size = {
        **dict.fromkeys(("read", "write", "send", "receive"), slots.wire),
        "saved": slots.saved,
        "e_saved": max(encoder.saved for encoder in encoders),
    }.get(column, max(max(encoder.feature, encoder.hidden) for encoder in encoders))
    return [value for value in range(NONE, size + 1) if value != old]


def cells(program: Program, column: str) -> Iterator[tuple[int, int, int, int]]:
    """Tick, device, entry and place in the row."""
    where = program.columns[column]
    places = range(where.start, where.stop) if isinstance(where, slice) else [where]
    for tick in range(program.ticks):
        for device in range(program.pipeline.stages):
            for entry, place in enumerate(places):
                yield tick, device, entry, place


def changed(program: Program, tick: int, device: int, place: int, value: int) -> Program:
    table = program.table.copy()
    table[tick, device, place] = value
    return dataclasses.replace(program, table=table)


def small_program() -> tuple[Program, Schedule]:
    """Every form of encoder task, and chunks."""
    pipe = Pipeline(2, 2, chunks=2, encoders=(EncoderPipeline((2,)),))
    schedule = Schedule.parse(
        """
        0: EF0.0[0:1) EF1 EF0.0[1:2) F0 F1 F0c1 F1c1 B0c1 B1c1 B0 EB0.0[1:2) B1 EB1 EB0.0[0:1)
        1: EF0.1 F0 F1 F0c1 B0c1 F1c1 B1c1 B0 EB0.1[1:2) EB0.1[0:1) B1
        """,
        pipe,
    )
    return lower(schedule, Durations.uniform(pipe), bucket=1), schedule


@pytest.mark.parametrize("column", COLUMNS)
def test_a_change_of_a_cell_is_refused_unless_nobody_reads_it(column: str) -> None:
    program, schedule = small_program()
    expected = arithmetic.sequential(schedule.pipeline, schedule.encoded)
    for tick, device, entry, place in cells(program, column):
        unread = is_unread(program, tick, device, column, entry)
        old = int(program.table[tick, device, place])
        for value in other_values(program, column, old):
            damaged = changed(program, tick, device, place, value)
            if unread:
                assert arithmetic.run(damaged) == expected, (tick, device, entry, value)
            else:
                with pytest.raises(ScheduleError, match=r"\bdevice \d"):
                    validate(damaged, schedule)


@pytest.mark.parametrize("seed", range(12))
def test_what_changes_the_result_is_refused(seed: int) -> None:
    rng = random.Random(seed)
    pipe = rng.choice([Pipeline(2, 3), Pipeline(3, 2, chunks=2, llm_layers=(2, 1, 1, 1, 2, 1))])
    pipe = dataclasses.replace(pipe, encoders=(EncoderPipeline((3,)),))
    schedule = random_schedule(pipe, rng)
    program = lower(schedule, Durations.uniform(pipe), bucket=1)
    expected = arithmetic.sequential(pipe, schedule.encoded)
    noticed = 0
    for _ in range(60):
        column = rng.choice(COLUMNS)
        tick, device, _, place = rng.choice(list(cells(program, column)))
        others = other_values(program, column, int(program.table[tick, device, place]))
        if not others:  # there is only one encoder
            continue
        value = rng.choice(others)
        damaged = changed(program, tick, device, place, value)
        try:
            same = arithmetic.run(damaged) == expected
        except IndexError:
            same = False
        if not same:
            noticed += 1
            with pytest.raises(ScheduleError, match=r"\bdevice \d"):
                validate(damaged, schedule)
    assert noticed


def test_a_pattern_may_only_have_more_links() -> None:
    pipe = Pipeline(4, 2)
    schedule = random_schedule(pipe, random.Random(0))
    program = lower(schedule, Durations.uniform(pipe), bucket=1)
    patterns = alphabet(pipe)
    for tick, old in enumerate(program.pattern):
        for index, pattern in enumerate(patterns):
            pattern_of = program.pattern.copy()
            pattern_of[tick] = index
            damaged = dataclasses.replace(program, pattern=pattern_of)
            links, payload = patterns[old].links, patterns[old].payload
            if links <= pattern.links and (not links or payload == pattern.payload):
                validate(damaged, schedule)
            else:
                with pytest.raises(ScheduleError, match=rf"^tick {tick} device \d"):
                    validate(damaged, schedule)


def _encoder_program() -> tuple[Program, Schedule]:
    pipe = Pipeline(2, 1)
    schedule = Schedule.parse("0: EF0 F0 B0 EB0\n1: F0 B0", pipe)
    return lower(schedule, Durations.uniform(pipe), bucket=1), schedule


@pytest.mark.parametrize("count", [0, 3, 99])
def test_a_count_of_no_or_too_many_units_is_refused(count: int) -> None:
    program, schedule = _encoder_program()
    with pytest.raises(ScheduleError, match="tick 0 device 0"):
        validate(changed(program, 0, 0, program.columns.at["count"], count), schedule)


def test_a_negative_count_is_refused() -> None:
    pipe = Pipeline(2, 1)
    schedule = Schedule.parse("0: EF0.0 F0 B0 EB0.0\n1: EF0.1 F0 B0 EB0.1", pipe)
    program = lower(schedule, Durations.uniform(pipe), bucket=1)
    with pytest.raises(ScheduleError, match="tick 0 device 0"):
        validate(changed(program, 0, 0, program.columns.at["count"], -1), schedule)


@pytest.mark.parametrize("kind", [-1, 5])
def test_an_unknown_kind_is_refused(kind: int) -> None:
    program, schedule = _encoder_program()
    with pytest.raises(ScheduleError, match="tick 0 device 0"):
        validate(changed(program, 0, 0, program.columns.at["kind"], kind), schedule)


@pytest.mark.parametrize("tick_of", ["F0", "B0"])
def test_features_of_a_microbatch_without_images_are_refused(tick_of: str) -> None:
    """The first stage reads and writes every slot that is named there."""
    pipe = Pipeline(2, 2)
    schedule = Schedule.parse("0: EF1 F0 F1 B0 B1 EB1\n1: F0 B0 F1 B1", pipe)
    program = lower(schedule, Durations.uniform(pipe), bucket=1)
    tick = next(t for t in range(program.ticks) if str(program.task(t, 0)) == tick_of)
    damaged = changed(program, tick, 0, program.columns.at["feature"].start, 0)
    with pytest.raises(ScheduleError, match=f"tick {tick} device 0: {tick_of} has feature"):
        validate(damaged, schedule)
