"""Incomplete schedules and damaged Programs: what is refused, and where the message points."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable

import numpy as np
import pytest

from optimus_jax.schedule.lower import lower
from optimus_jax.schedule.program import NONE, Columns, EncoderSlots, Program, Slots
from optimus_jax.schedule.simulate import Durations
from optimus_jax.schedule.task import EncoderPipeline, Pipeline, Schedule, ScheduleError
from optimus_jax.schedule.validate import validate
from tests.schedule.lower_test import one_less
from tests.schedule.pictures import picture

PIPE = Pipeline(2, 2, encoders=(EncoderPipeline((2,)),))
SCHEDULE = Schedule.parse(
    """
    0: EF0.0[0:1) EF1 EF0.0[1:2) F0 F1 B0 EB0.0[1:2) B1 EB1 EB0.0[0:1)
    1: EF0.1 F0 B0 F1 EB0.1[1:2) EB0.1[0:1) B1
    """,
    PIPE,
)
PROGRAM = lower(SCHEDULE, Durations.uniform(PIPE), bucket=1)
AT = PROGRAM.columns
PICTURE = """
    EF0.0[0:1) EF0.1      |
    EF1        .          |
    EF0.0[1:2) .          | 1>0:1
    F0         .          | 0>1
    F1         F0         | 0>1
    .          B0         | 1>0
    B0         F1         | 0>1:1
    EB0.0[1:2) EB0.1[1:2) |
    .          EB0.1[0:1) |
    .          B1         | 1>0
    B1         .          |
    EB1        .          |
    EB0.0[0:1) .          |
"""


def test_the_program_that_gets_damaged_below() -> None:
    assert picture(PROGRAM) == textwrap.dedent(PICTURE).strip()
    assert PROGRAM.slots == Slots(wire=3, saved=2, encoders=(EncoderSlots(feature=4, saved=3),))
    validate(PROGRAM, SCHEDULE)


class Tables:
    """Copies of the tables, to be damaged."""

    def __init__(self) -> None:
        self.table, self.pattern = PROGRAM.table.copy(), PROGRAM.pattern.copy()

    def get(self, tick: int, device: int, column: str) -> np.ndarray:
        return PROGRAM.table[tick, device, AT[column]]

    def put(self, tick: int, device: int, column: str, value: object) -> None:
        self.table[tick, device, AT[column]] = value

    def copy_task(self, source: int, target: int, device: int) -> None:
        """The columns of a task, not those of the exchange after it."""
        for name in Columns.NAMES:
            if "send" not in name and "receive" not in name:
                self.put(target, device, name, self.get(source, device, name))

    def swap_tasks(self, a: int, b: int, device: int) -> None:
        self.copy_task(a, b, device)
        self.copy_task(b, a, device)

    def drop_move(self, tick: int, sender: int, prefix: str = "") -> None:
        self.put(tick, sender, prefix + "send", NONE)
        self.put(tick, 1 - sender, prefix + "receive", NONE)


Damage = Callable[[Tables], None]

DAMAGES: dict[str, tuple[Damage, str]] = {
    "dropped send": (
        lambda t: t.put(3, 0, "send", NONE),
        "tick 3 device 0 sends nothing, but is awaited by device 1 without answer",
    ),
    "dropped receive": (
        lambda t: t.put(3, 1, "receive", NONE),
        "tick 3 device 0 sends to device 1 without answer",
    ),
    "dropped send and receive": (
        lambda t: t.drop_move(3, 0),
        "tick 4 device 0: activation of microbatch 1 stage 1 overwrites activation of"
        " microbatch 0 stage 1, still live in wire slot 0",
    ),
    "dropped send of features": (
        lambda t: t.put(2, 1, "e_send", NONE),
        "tick 2 device 0 receives from device 1 without a match",
    ),
    "dropped receive of features": (
        lambda t: t.put(2, 0, "e_receive", NONE),
        "tick 2 device 0 ignores what comes from device 1 without a match",
    ),
    "dropped send and receive of features": (
        lambda t: t.drop_move(2, 1, "e_"),
        "tick 3 device 0: expected feature of microbatch 0 unit 1 in feature slot 3, found nothing",
    ),
    "send over no link": (
        lambda t: t.put(0, 1, "send", 0),
        "tick 0 device 1 sends or receives, but pattern 0 gives it no link",
    ),
    "send of nothing": (
        lambda t: t.put(3, 0, "send", 1),
        "tick 3 device 0 sends wire slot 1, which holds nothing",
    ),
    "doubled task": (
        lambda t: t.copy_task(3, 5, device=0),
        "tick 5 device 0: F0 runs a second time",
    ),
    "missing task": (
        lambda t: t.put(1, 0, "e_kind", 0),
        "tick 2 device 0: EF0.0[1:2) runs where the schedule has EF1",
    ),
    "missing last task": (
        lambda t: t.put(12, 0, "e_kind", 0),
        "device 0 never runs EB0.0[0:1)",
    ),
    "swapped tasks": (
        lambda t: t.swap_tasks(3, 4, device=0),
        "tick 3 device 0: F1 runs where the schedule has F0",
    ),
    "task moved before its input": (
        lambda t: t.swap_tasks(9, 8, device=1),
        "tick 8 device 1: B1 runs where the schedule has EB0.1[0:1)",
    ),
    "overwritten wire slot": (
        lambda t: t.put(6, 1, "write", 0),
        "tick 6 device 1: gradient of microbatch 1 stage 1 overwrites activation of"
        " microbatch 1 stage 1, still live in wire slot 0",
    ),
    "overwritten feature slot": (
        lambda t: t.put(2, 0, "e_write", [1, NONE]),
        "tick 2 device 0: feature of microbatch 0 unit 0 overwrites feature of microbatch 1"
        " unit 1, still live in feature slot 1",
    ),
    "overwritten by what arrives": (
        lambda t: t.put(2, 0, "e_receive", [0, NONE]),
        "tick 2 device 0: feature of microbatch 0 unit 1 overwrites feature of microbatch 1"
        " unit 0, still live in feature slot 0",
    ),
    "overwritten saved state": (
        lambda t: t.put(4, 0, "saved", 0),
        "tick 4 device 0: saved state of microbatch 1 stage 0 overwrites saved state of"
        " microbatch 0 stage 0, still live in saved slot 0",
    ),
    "overwritten encoder state": (
        lambda t: t.put(1, 0, "e_saved", [0, 2]),
        "tick 1 device 0: saved state of microbatch 1 unit 0 overwrites saved state of"
        " microbatch 0 unit 0, still live in encoder slot 0",
    ),
    "wrong slot read": (
        lambda t: t.put(5, 1, "read", 0),
        "tick 5 device 1: expected gradient of microbatch 0 stage 1 in wire slot 0, found"
        " activation of microbatch 1 stage 1",
    ),
    "features read in another order": (
        lambda t: t.put(4, 0, "feature", [1, 0]),
        "tick 4 device 0: expected feature of microbatch 1 unit 0 in feature slot 1, found"
        " feature of microbatch 1 unit 1",
    ),
    "wrong saved state": (
        lambda t: t.put(6, 0, "saved", 1),
        "tick 6 device 0: expected saved state of microbatch 0 stage 0 in saved slot 1, found"
        " saved state of microbatch 1 stage 0",
    ),
    "wrong encoder state": (
        lambda t: t.put(7, 0, "e_saved", [1, NONE]),
        "tick 7 device 0: expected saved state of microbatch 0 unit 0 in encoder slot 1, found"
        " saved state of microbatch 1 unit 0",
    ),
    "slot beyond the caps": (
        lambda t: t.put(3, 0, "write", 3),
        "tick 3 device 0: activation of microbatch 0 stage 1 is written to wire slot 3,"
        " there are 3",
    ),
    "no slot": (
        lambda t: t.put(4, 0, "saved", NONE),
        "tick 4 device 0: saved state of microbatch 1 stage 0 is written to saved slot -1,"
        " there are 2",
    ),
    "wrong microbatch": (
        lambda t: t.put(6, 0, "microbatch", 1),
        "tick 6 device 0: B1 runs where the schedule has B0",
    ),
    "wrong chunk": (
        lambda t: t.put(6, 0, "chunk", 1),
        "tick 6 device 0: B0c1 runs where the schedule has B0",
    ),
    "wrong unit": (
        lambda t: t.put(0, 1, "unit", [0, 0]),
        "tick 0 device 1: EF0.0 runs where the schedule has EF0.1",
    ),
    "wrong units": (
        lambda t: t.put(11, 0, "unit", [1, 0]),
        "tick 11 device 0: EB1.1+0 runs where the schedule has EB1",
    ),
    "too few units": (
        lambda t: t.put(11, 0, "count", 1),
        "tick 11 device 0: EB1.0 runs where the schedule has EB1",
    ),
    "too many layers": (
        lambda t: t.put(7, 1, "begin", 0),
        "tick 7 device 1: EB0.1 runs where the schedule has EB0.1[1:2)",
    ),
    "too few layers": (
        lambda t: t.put(2, 0, "end", 1),
        "tick 2 device 0: EF0.0[1:1) runs where the schedule has EF0.0[1:2)",
    ),
    "wrong first": (
        lambda t: t.put(4, 1, "first", 1),
        "tick 4 device 1: F0 has first 1, wanted 0",
    ),
    "wrong last": (
        lambda t: t.put(5, 1, "last", 0),
        "tick 5 device 1: B0 has last 0, wanted 1",
    ),
    "wrong count of LLM layers": (
        lambda t: t.put(3, 0, "layers", 2),
        "tick 3 device 0: F0 has layers 2, wanted 1",
    ),
    "no exchange": (
        lambda t: t.pattern.__setitem__(3, 0),
        "tick 3 device 0 sends or receives, but pattern 0 gives it no link",
    ),
    "features for LLM values": (
        lambda t: t.pattern.__setitem__(3, 2),
        "tick 3 device 0 sends or receives, but pattern 2 gives it no link",
    ),
    "LLM values for features": (
        lambda t: t.pattern.__setitem__(6, 1),
        "tick 6 device 0 sends or receives, but pattern 1 gives it no link",
    ),
    "pattern outside the alphabet": (
        lambda t: t.pattern.__setitem__(3, 3),
        "tick 3: pattern 3 is not in the alphabet",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_damaged_programs_are_refused(damage: Damage, message: str) -> None:
    tables = Tables()
    damage(tables)
    program = Program(PIPE, PROGRAM.slots, tables.table, tables.pattern)
    with pytest.raises(ScheduleError) as refused:
        validate(program, SCHEDULE)
    assert str(refused.value) == message


@pytest.mark.parametrize("kind", ["wire", "feature", "saved", "encoder"])
def test_programs_stay_within_their_slots(kind: str) -> None:
    fewer = one_less(PROGRAM.slots, kind)
    program = dataclasses.replace(PROGRAM, slots=fewer)
    with pytest.raises(
        ScheduleError,
        match=rf"^tick \d+ device \d: .* is written to {kind} slot {fewer.of(kind)}, ",
    ):
        validate(program, SCHEDULE)
