"""The cap on saved encoder state: kept by the methods that can, refused by the others."""

from __future__ import annotations

import dataclasses
import re

import pytest

from optimus_jax.schedule.complete import check_complete, least_cap, most_saved
from optimus_jax.schedule.lower import lower
from optimus_jax.schedule.methods import schedule
from optimus_jax.schedule.simulate import Durations
from optimus_jax.schedule.task import EncoderPipeline, Pipeline, Schedule, ScheduleError
from optimus_jax.schedule.validate import validate

ONE = Pipeline(4, 8, encoders=(EncoderPipeline((2,)),))
PIPES = {
    "one stage": Pipeline(2, 3, encoders=(EncoderPipeline((2,)),)),
    "two stages": Pipeline(4, 4, encoders=(EncoderPipeline((1, 1)),)),
    "two encoders": Pipeline(2, 2, encoders=(EncoderPipeline((1, 1)), EncoderPipeline((2,)))),
    "chunks": Pipeline(2, 2, 2),
}


@pytest.mark.parametrize(
    ("name", "method"), [*((name, "filled_whole") for name in PIPES), ("one stage", "filled")]
)
def test_the_least_cap_that_a_refusal_names_is_enough(name: str, method: str) -> None:
    pipe = PIPES[name]
    durations = Durations.uniform(pipe)
    with pytest.raises(ScheduleError, match="the cap of 1 microbatches is too little") as refused:
        schedule(method, "1f1b", dataclasses.replace(pipe, cap=1), durations)
    (least,) = map(int, re.findall(r"needs at least (\d+)", str(refused.value)))
    found = schedule(method, "1f1b", dataclasses.replace(pipe, cap=least), durations)
    assert least_cap(found) <= least
    validate(lower(found, durations), found)


def test_as_many_spread_microbatches_as_1f1b_has_in_flight_are_enough() -> None:
    """Each device then holds one unit of each."""
    durations = Durations.uniform(ONE)
    found = schedule("filled", "1f1b", dataclasses.replace(ONE, cap=4), durations)
    assert max(most_saved(order, d, ONE, 0) for d, order in enumerate(found.orders)) == 4


@pytest.mark.parametrize(
    ("method", "least"), [("phased", 8), ("encoder_first", 16), ("text_only", 0)]
)
def test_other_methods_name_the_cap_that_they_need(method: str, least: int) -> None:
    """Of 8 microbatches each of 4 devices holds 2, all their 4 units: 8 microbatches' worth of one
    unit; the first stage alone holds the 4 in flight."""
    durations = Durations.uniform(ONE)
    if not least:
        schedule(method, "1f1b", dataclasses.replace(ONE, cap=1), durations)
        return
    with pytest.raises(ScheduleError) as refused:
        schedule(method, "1f1b", dataclasses.replace(ONE, cap=least - 1), durations)
    assert str(refused.value) == (
        f"{method} keeps more saved encoder state than a cap of {least - 1} microbatches shared by"
        f" the encoder's pipelines allows: it needs a cap of at least {least}"
    )
    found = schedule(method, "1f1b", dataclasses.replace(ONE, cap=least), durations)
    assert least_cap(found) == least


def test_schedules_beyond_the_cap_are_refused() -> None:
    text = "0: EF0 EF1 F0 F1 B0 EB0 B1 EB1\n1: F0 B0 F1 B1"
    free, capped = Pipeline(2, 2), Pipeline(2, 2, cap=3)
    check_complete(Schedule.parse(text, free))
    with pytest.raises(
        ScheduleError,
        match="device 0 holds the saved state of 4 units of encoder 0 at a time, the cap of 3"
        " microbatches allows 3",
    ):
        check_complete(Schedule.parse(text, capped))
    check_complete(Schedule.parse(text, Pipeline(2, 2, cap=4)))
    assert least_cap(Schedule.parse(text, free)) == 4


@pytest.mark.parametrize(
    ("units", "stages", "cap", "most"), [(3, 1, 2, 2), (4, 2, 1, 2), (1, 1, 4, 1), (4, 1, 3, 3)]
)
def test_units_of_a_cap_round_up(units: int, stages: int, cap: int, most: int) -> None:
    """`cap` microbatches of `units` over 4 / `stages` pipelines."""
    pipe = Pipeline(4, 2, encoders=(EncoderPipeline((1,) * stages, units),), cap=cap)
    assert pipe.units_cap(0) == most
