"""Encoders of several stages, and several encoders: what moves, what is proven, what it costs."""

from __future__ import annotations

import dataclasses
import textwrap

import pytest

from optimus_jax.schedule.dataflow import Dataflow, Payload, is_kept, reads_and_writes
from optimus_jax.schedule.lower import lower
from optimus_jax.schedule.program import NONE, EncoderSlots, Program, alphabet, payloads
from optimus_jax.schedule.simulate import Durations
from optimus_jax.schedule.task import EncoderPipeline, Pipeline, Schedule, ScheduleError, Task
from optimus_jax.schedule.validate import check_complete, validate
from tests.schedule import arithmetic
from tests.schedule.pictures import picture

# Layers 0 and 1 on even devices, layer 2 on odd ones.
PIPE = Pipeline(4, 1, encoders=(EncoderPipeline((2, 1)),))
SCHEDULE = Schedule.parse(
    """
    0: EF0.0[0:1) EF0.0[1:2) F0 B0 EB0.0
    1: EF0.0 F0 B0 EB0.0
    2: EF0.1 F0 B0 EB0.1
    3: EF0.1 F0 B0 EB0.1
    """,
    PIPE,
)
PROGRAM = lower(SCHEDULE, Durations.uniform(PIPE), bucket=1)
PICTURE = """
    EF0.0[0:1) .          EF0.1      .          | 2>3h:1
    EF0.0[1:2) .          .          EF0.1      | 0>1h:1
    .          EF0.0      .          .          | 3>0:1
    .          .          .          .          | 1>0:1
    F0         .          .          .          | 0>1
    .          F0         .          .          | 1>2
    .          .          F0         .          | 2>3
    .          .          .          F0         |
    .          .          .          B0         | 3>2
    .          .          B0         .          | 2>1
    .          B0         .          .          | 1>0
    B0         .          .          .          | 0>1:1
    .          EB0.0      .          .          | 0>3:1
    .          .          .          EB0.1      | 1>0h:1 3>2h:1
    EB0.0      .          EB0.1      .          |
"""
TWO = Pipeline(4, 2, encoders=(EncoderPipeline((2, 1)), EncoderPipeline((2,), units=2)))

FLOWS = {
    ("EF0.1", 2): " -> hidden 0.1 layer 2",
    ("EF0.1[0:1)", 2): " -> hidden 0.1 layer 1",
    ("EF0.1", 3): "hidden 0.1 layer 2 -> feature 0.1",
    ("EB0.1", 3): "feature gradient 0.1 -> hidden gradient 0.1 layer 2",
    ("EB0.1", 2): "hidden gradient 0.1 layer 2 -> ",
    ("EB0.1[0:1)", 2): "hidden gradient 0.1 layer 1 -> ",
    ("EF0e1.1[0:1)", 2): " -> e1 hidden 0.1 layer 1",
    ("F0", 0): "feature 0.0, feature 0.1, e1 feature 0.0, e1 feature 0.1 -> activation 0",
    ("F0|EF1.0", 1): "activation 0, hidden 1.0 layer 2 -> activation 0, feature 1.0",
}


@pytest.mark.parametrize(("case", "expected"), FLOWS.items(), ids=str)
def test_each_task_reads_and_writes(case: tuple[str, int], expected: str) -> None:
    sides = []
    for values in reads_and_writes(Task.parse(case[0]), case[1], TWO, frozenset({0})):
        words = []
        for v in values:
            unit = f".{v.place}" if v.is_feature or v.is_hidden else ""
            layer = f" layer {v.layer}" if v.is_hidden else ""
            encoder = f"e{v.encoder} " if v.encoder else ""
            words.append(f"{encoder}{v.content} {v.microbatch}{unit}{layer}")
        sides.append(", ".join(words))
    assert " -> ".join(sides) == expected


def test_hidden_states_move_between_stages_and_stay_inside_them() -> None:
    flow = Dataflow.of(SCHEDULE)
    hidden = {v for v in flow.producer if v.is_hidden}
    assert {v.layer for v in hidden if is_kept(v, PIPE)} == {1}
    assert {v.layer for v in hidden if flow.moves(v)} == {2}
    assert {v.payload for v in hidden} == {Payload("hidden", 0)}


def test_payload_classes_and_their_patterns_stand_together() -> None:
    assert payloads(PIPE) == (Payload("llm"), Payload("feature"), Payload("hidden"))
    assert payloads(TWO)[3:] == (Payload("feature", 1),)
    words = []
    for pattern in alphabet(TWO)[4:]:
        links = ",".join(f"{a}-{b}" for a, b in sorted(pattern.links))
        words.append(f"{pattern.payload.content}{pattern.payload.encoder} {links}")
    assert words == [
        *("llm0 2-3", "feature0 0-1", "feature0 0-3"),
        *("hidden0 0-1,2-3", "hidden0 0-1", "hidden0 2-3"),
        *("feature1 0-1", "feature1 0-2", "feature1 0-3"),
    ]
    four = Pipeline(4, 1, encoders=(EncoderPipeline((1, 1, 1, 1)),))
    hidden = [p.links for p in alphabet(four) if p.payload.content == "hidden"]
    assert hidden == [{(0, 1), (2, 3)}, {(1, 2)}, {(0, 1)}, {(2, 3)}]


def test_the_program_looks_like_its_picture() -> None:
    assert picture(PROGRAM) == textwrap.dedent(PICTURE).strip()
    validate(PROGRAM, SCHEDULE)
    assert PROGRAM.slots.encoders == (EncoderSlots(feature=2, hidden=1, saved=1),)
    assert arithmetic.run(PROGRAM) == arithmetic.sequential(PIPE, frozenset({0}))


def test_columns_of_encoder_tasks_are_local_to_the_stage() -> None:
    at = PROGRAM.columns

    def columns(tick: int, device: int) -> list[int]:
        row = PROGRAM.table[tick, device]
        names = ("e_kind", "begin", "end", "embeds", "projects")
        slots = (int(row[at[name]][0] != NONE) for name in ("e_read", "e_write"))
        return [int(row[at[name]]) for name in names] + list(slots)

    assert columns(0, 0) == [3, 0, 1, 1, 0, 0, 0]
    assert columns(1, 0) == [3, 1, 2, 0, 0, 0, 1]
    assert columns(2, 1) == [3, 0, 1, 0, 1, 1, 1]
    assert columns(12, 1) == [4, 0, 1, 0, 1, 1, 1]
    assert columns(14, 0) == [4, 0, 2, 1, 0, 1, 0]


def damaged(**cells: tuple[int, int, object]) -> Program:
    """With other values in columns, each given as (tick, device, value)."""
    table = PROGRAM.table.copy()
    for name, (tick, device, value) in cells.items():
        table[tick, device, PROGRAM.columns[name]] = value
    return dataclasses.replace(PROGRAM, table=table)


DAMAGES = {
    "dropped hidden send": (
        dict(e_send=(1, 0, NONE)),
        "tick 1 device 0 sends nothing, but is awaited by device 1 without answer",
    ),
    "dropped hidden send and receive": (
        dict(e_send=(1, 0, NONE), e_receive=(1, 1, NONE)),
        "tick 2 device 1: expected hidden of microbatch 0 unit 0 layer 2 in hidden slot 0, found"
        " nothing",
    ),
    "hidden state not written": (
        dict(e_write=(1, 0, NONE)),
        "tick 1 device 0: hidden of microbatch 0 unit 0 layer 2 is written to hidden slot -1,"
        " there are 1",
    ),
    "no projector": (dict(projects=(2, 1, 0)), "tick 2 device 1: EF0.0 has projects 0, wanted 1"),
    "no embedding": (
        dict(embeds=(0, 0, 0)),
        "tick 0 device 0: EF0.0[0:1) has embeds 0, wanted 1",
    ),
    "features of the wrong unit": (
        dict(feature=(4, 0, [0, 1])),
        "tick 4 device 0: expected feature of microbatch 0 unit 0 in feature slot 0, found feature"
        " of microbatch 0 unit 1",
    ),
    "unit of the other pipeline": (
        dict(unit=(2, 1, [1, 0])),
        "tick 2 device 1: EF0.1 runs where the schedule has EF0.0",
    ),
}


@pytest.mark.parametrize(("cells", "message"), DAMAGES.values(), ids=DAMAGES)
def test_damaged_programs_are_refused(cells: dict, message: str) -> None:
    with pytest.raises(ScheduleError) as refused:
        validate(damaged(**cells), SCHEDULE)
    assert str(refused.value) == message


def test_hidden_states_need_their_own_pattern() -> None:
    """Features and hidden states of one encoder use the same columns over the same link."""
    pattern = PROGRAM.pattern.copy()
    features = [n for n, p in enumerate(alphabet(PIPE)) if p.payload.content == "feature"]
    hidden = int(pattern[1])
    pattern[1] = features[0]
    with pytest.raises(ScheduleError, match="tick 1 device"):
        validate(dataclasses.replace(PROGRAM, pattern=pattern), SCHEDULE)
    pattern[1], pattern[2] = hidden, hidden
    with pytest.raises(ScheduleError, match="tick 2 device"):
        validate(dataclasses.replace(PROGRAM, pattern=pattern), SCHEDULE)


BASE = {
    0: "EF0.0 F0 B0 EB0.0",
    1: "EF0.0 F0 B0 EB0.0",
    2: "EF0.1 F0 B0 EB0.1",
    3: "EF0.1 F0 B0 EB0.1",
}


def written(lines: dict[int, str]) -> str:
    return "\n".join(f"{d}: {line}" for d, line in lines.items())


REFUSED = {
    "another pipeline": (
        {1: "EF0.1 F0 B0 EB0.0", 3: "EF0.0 F0 B0 EB0.1"},
        "EF0.1 stands in pipeline 1 (device 2), but unit 1 of microbatch 0 is in pipeline 0",
    ),
    "layers of another stage": (
        {1: "EF0.0[1:3) F0 B0 EB0.0"},
        "EF0.0[1:3) on device 1, which has layers 2 to 3",
    ),
    "a stage is missing": ({3: "F0 B0 EB0.1"}, "EF0.1 runs layer 2 0 times, wanted 1"),
    "a stage runs twice": ({3: "EF0.1 EF0.1 F0 B0 EB0.1"}, "EF0.1 runs layer 2 2 times, wanted 1"),
    "no such encoder": ({3: "EF0.1 EF0e1.1 F0 B0 EB0.1"}, "EF0e1.1 on device 3: there are 1 enc.*"),
}


@pytest.mark.parametrize(("changed", "message"), REFUSED.values(), ids=REFUSED)
def test_incomplete_schedules_are_refused(changed: dict[int, str], message: str) -> None:
    text = written(BASE | changed)
    pattern = message if message.endswith(".*") else None
    with pytest.raises(ScheduleError, match=pattern) as refused:
        check_complete(Schedule.parse(text, PIPE))
    assert pattern or str(refused.value) == message


def test_the_dataflow_keeps_units_in_their_pipeline() -> None:
    swapped = {1: "EF0.1 F0 B0 EB0.0", 3: "EF0.0 F0 B0 EB0.1"}
    with pytest.raises(ScheduleError, match="an encoder unit stays in its pipeline"):
        Dataflow.of(Schedule.parse(written(BASE | swapped), PIPE))
