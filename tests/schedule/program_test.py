"""The table's columns, the alphabet of patterns, and the time and shape of a Program."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from optimus_jax.schedule.dataflow import LLM, Dataflow, Payload
from optimus_jax.schedule.exchange import place_exchanges
from optimus_jax.schedule.lower import lower
from optimus_jax.schedule.program import (
    KINDS,
    NONE,
    Columns,
    EncoderSlots,
    Meeting,
    Program,
    Slots,
    alphabet,
    fit_together,
    task_of,
)
from optimus_jax.schedule.simulate import Durations, EncoderDurations
from optimus_jax.schedule.task import EncoderPipeline, Kind, Pipeline, Schedule, ScheduleError, Task
from optimus_jax.schedule.validate import validate
from tests.schedule.planned import planned

FEATURES = Payload("feature")


def of_units(units: int) -> Pipeline:
    return Pipeline(1, 1, encoders=(EncoderPipeline(units=units),))


# `-` joins LLM neighbours, `~` encoder pipeline and first stage; one pattern for each word
ALPHABETS = {
    (1, 2, 1): "none",
    (1, 2, 2): "none",
    (2, 4, 1): "none 0-1 0~1",
    (2, 4, 2): "none 0-1 0~1",
    (3, 3, 1): "none 0-1 1-2 0~1 0~2",
    (3, 3, 2): "none 0-1 1-2 0-2 0~1 0~2",
    (4, 8, 1): "none 0-1,2-3 1-2 0-1 2-3 0~1 0~2 0~3",
    (5, 5, 2): "none 0-1,2-3 1-2,3-4 0-1 1-2 2-3 3-4 0-4 0~1 0~2 0~3 0~4",
}


@pytest.mark.parametrize(("sizes", "expected"), ALPHABETS.items(), ids=str)
def test_alphabet(sizes: tuple[int, int, int], expected: str) -> None:
    words = []
    for pattern in alphabet(Pipeline(*sizes)):
        links = sorted(pattern.links)
        words.append(",".join(f"{a}{'-' if pattern.payload == LLM else '~'}{b}" for a, b in links))
    assert " ".join(word or "none" for word in words) == expected


@pytest.mark.parametrize("units", [1, 2, 5])
def test_columns_fill_a_row_without_overlap(units: int) -> None:
    columns = Columns(of_units(units))
    row = np.zeros(columns.width, int)
    for name in Columns.NAMES:
        row[columns[name]] += 1
    assert (row == 1).all()
    assert row[columns["feature"]].shape == (units,)
    assert all(row[columns[name]].shape == (units,) for name in Columns.VECTORS)


def test_an_idle_row_names_no_task_and_no_slot() -> None:
    columns = Columns(of_units(3))
    row = columns.idle_row()
    assert row.dtype == np.int32
    for name in Columns.NAMES:
        assert (row[columns[name]] == (NONE if name in Columns.SLOTS else 0)).all()
    assert 0 not in KINDS.values()


def test_slots_that_cover() -> None:
    one = Slots(1, 5, (EncoderSlots(2, 0, 4),))
    other = Slots(3, 4, (EncoderSlots(2, 1, 3), EncoderSlots(5)))
    both = Slots(3, 5, (EncoderSlots(2, 1, 4), EncoderSlots(5)))
    assert one.covering(other) == other.covering(one) == both
    assert Slots().covering(one) == one


def one_row(task: Task, pipe: Pipeline) -> Program:
    """A Program of one tick and device with the columns of one task, written out here."""
    columns = Columns(pipe)
    row = columns.idle_row()
    numbers = {"F": 1, "B": 2, "EF": 3, "EB": 4}
    if not task.kind.is_encoder:
        row[columns["kind"]], row[columns["microbatch"]] = numbers[task.kind], task.microbatch
        row[columns["chunk"]] = task.chunk
    if part := task.encoder_part:
        units = pipe.units_of(part)
        row[columns["e_kind"]], row[columns["e_microbatch"]] = numbers[part.kind], part.microbatch
        row[columns["unit"]][: len(units)] = units
        row[columns["count"]] = len(units)
        row[columns["begin"]], row[columns["end"]] = pipe.layers_of(part, 0)
    return Program(pipe, Slots(), row[None, None], np.zeros(1, np.int32))


@pytest.mark.parametrize(
    "text", ["F3", "B0c1", "EF2", "EF2.1", "EB1.0+2", "EB0[1:3)", "EF0.2[2:4)", "EF3.0+1[0:1)"]
)
def test_tasks_are_read_back_from_the_table(text: str) -> None:
    pipe = Pipeline(1, 4, chunks=2, encoders=(EncoderPipeline((4,), 3),))
    assert str(one_row(Task.parse(text), pipe).task(0, 0)) == text


def test_rows_without_a_task_and_of_no_kind() -> None:
    pipe = Pipeline(1, 4, encoders=(EncoderPipeline(units=3),))
    at = Columns(pipe)
    row = at.idle_row()
    assert task_of(row, pipe, 0) is None
    row[at["kind"]], row[at["microbatch"]] = 1, 3
    assert task_of(row, pipe, 0) == Task(Kind.F, 3)
    row[at["kind"]] = 7
    with pytest.raises(ScheduleError, match=r"^no task has kind 7$"):
        task_of(row, pipe, 0)
    table = np.stack([at.idle_row(), row])[:, None]
    with pytest.raises(ScheduleError, match=r"^tick 1 device 0: no task has kind 7$"):
        Program(pipe, Slots(), table, np.zeros(2, np.int32)).task(1, 0)


def by_hand() -> Program:
    """Ticks of one task each on two stages: EF, F, F, B, B; features and LLM values move."""
    pipe = Pipeline(2, 1)
    columns, (none, link, features) = Columns(pipe), range(3)
    kinds = [("EF", "idle"), ("F", "idle"), ("idle", "F"), ("idle", "B"), ("B", "idle")]
    table = np.stack([np.stack([columns.idle_row()] * 2)] * len(kinds))
    for tick, row in enumerate(kinds):
        for device, kind in enumerate(row):
            if kind != "idle":
                column = columns["e_kind" if kind == "EF" else "kind"]
                table[tick, device, column] = KINDS[Kind(kind)]
    table[0, 0, columns["count"]] = 2
    table[0, 0, columns["end"]] = 1
    table[0, 0, columns["unit"]] = 0, 1
    pattern = np.array([features, link, none, link, none], np.int32)
    return Program(pipe, Slots(), table, pattern)


def test_time_by_hand() -> None:
    """A tick starts when the last task and the exchange before it have ended on the device."""
    program = by_hand()
    durations = Durations((1, 10), (2, 20), (EncoderDurations((0.25,), (0.5,)),), transfer=0.125)
    assert [[(str(t), a, b) for t, a, b in row] for row in program.time(durations)] == [
        [("EF0", 0, 0.5), ("F0", 0.625, 1.625), ("B0", 31.875, 33.875)],
        [("F0", 1.75, 11.75), ("B0", 11.75, 31.75)],
    ]
    assert program.end(durations) == 33.875


def test_a_trace_has_the_meetings_and_features_travel_in_their_own_time() -> None:
    encoder = EncoderDurations((0.25,), (0.5,), feature_transfer=4.0)
    durations = Durations((1, 10), (2, 20), (encoder,), transfer=0.125)
    trace = by_hand().trace(durations)
    assert trace.meetings == [
        Meeting(tick=0, pair=(0, 1), payload=FEATURES, start=0.5, end=4.5),
        Meeting(tick=1, pair=(0, 1), payload=LLM, start=5.5, end=5.625),
        Meeting(tick=3, pair=(0, 1), payload=LLM, start=35.625, end=35.75),
    ]
    assert [[(str(t), a, b) for t, a, b in row] for row in trace.tasks] == [
        [("EF0", 0, 0.5), ("F0", 4.5, 5.5), ("B0", 35.75, 37.75)],
        [("F0", 5.625, 15.625), ("B0", 15.625, 35.625)],
    ]
    assert by_hand().time(durations) == trace.tasks


def test_devices_that_share_no_link_do_not_wait_for_one_another() -> None:
    pipe = Pipeline(4, 1)
    at = Columns(pipe)
    table = np.broadcast_to(at.idle_row(), (2, 4, at.width)).copy()
    table[0, :, at["kind"]] = KINDS[Kind.F]
    pattern = np.array([1, 2], np.int32)  # 0-1 and 2-3, then 1-2
    durations = Durations((1, 2, 3, 4), (1,) * 4, transfer=0.5)
    assert Program(pipe, Slots(), table, pattern).trace(durations).meetings == [
        Meeting(0, (0, 1), LLM, 2, 2.5),
        Meeting(0, (2, 3), LLM, 4, 4.5),
        Meeting(1, (1, 2), LLM, 4.5, 5),
    ]


@pytest.mark.parametrize(
    "case",
    [("phased", "1f1b", 2, 4, 1), ("coarse", "1f1b", 4, 4, 1), ("text_only", "1f1b", 4, 4, 2)],
    ids=str,
)
def test_time_is_that_of_its_placement_where_ticks_cost_nothing(case: tuple) -> None:
    found = planned(*case, 0.5)
    placement = place_exchanges(found.schedule, found.durations).timing(found.durations)
    end = {(d, x): end for d, x, _, end in placement.log if isinstance(x, Task)}
    for device, row in enumerate(found.program.time(found.durations)):
        assert {(device, task): end for task, _, end in row} == {
            key: value for key, value in end.items() if key[0] == device
        }


def test_programs_of_one_pipeline_fit_together() -> None:
    found = [planned(m, "1f1b", 2, 4, 1, 0.5) for m in ("text_only", "encoder_first", "phased")]
    fitted = fit_together([f.program for f in found])
    assert len({(p.slots, p.table.shape, p.pattern.shape) for p in fitted}) == 1
    assert fitted[0].ticks == max(f.program.ticks for f in found)
    for program, before in zip(fitted, found, strict=True):
        validate(program, before.schedule)
        assert program.end(before.durations) == before.program_end
        assert program.table.dtype == program.pattern.dtype == np.int32


def test_padding_never_makes_smaller() -> None:
    program = planned("phased", "1f1b", 2, 4, 1, 0.5).program
    assert program.padded(program.ticks, program.slots).ticks == program.ticks
    with pytest.raises(ScheduleError, match=r"does not fit the shape of"):
        program.padded(program.ticks - 1, program.slots)
    fewer = dataclasses.replace(program.slots.encoders[0], feature=1)
    smaller = dataclasses.replace(program.slots, encoders=(fewer,))
    with pytest.raises(ScheduleError, match=r"does not fit the shape of"):
        program.padded(program.ticks, smaller)


def test_every_exchange_of_a_program_is_of_the_alphabet() -> None:
    """Values move over links of their pattern only, and each moves once."""
    pipe = Pipeline(4, 4)
    found = planned("filled", "1f1b", 4, 4, 1, 1)
    program = lower(found.schedule, found.durations, bucket=1)
    flow = Dataflow.of(Schedule(pipe, found.schedule.orders))
    at, patterns = program.columns, alphabet(pipe)
    moved = 0
    for rows, index in zip(program.table, program.pattern, strict=True):
        pattern = patterns[index]
        linked = {d for link in pattern.links for d in link}
        for device, row in enumerate(rows):
            llm, features = row[at["send"]] >= 0, (row[at["e_send"]] >= 0).sum()
            assert not llm or (device in linked and pattern.payload == LLM)
            assert not features or (device in linked and pattern.payload == FEATURES)
            moved += int(llm) + int(features)
    assert moved == sum(map(flow.moves, flow.producer))
