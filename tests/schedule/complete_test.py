"""Schedules that lack a task, repeat one or put it elsewhere are refused."""

from __future__ import annotations

import dataclasses

import pytest

from optimus_jax.schedule.task import EncoderPipeline, Pipeline, Schedule, ScheduleError
from optimus_jax.schedule.validate import check_complete, validate
from tests.schedule.validate_test import PIPE, PROGRAM, SCHEDULE


def test_programs_of_another_pipeline_are_refused() -> None:
    other = dataclasses.replace(PROGRAM, pipeline=Pipeline(2, 2, encoders=(EncoderPipeline((3,)),)))
    with pytest.raises(ScheduleError, match=r"^program of Pipeline\(.*, schedule of Pipeline\("):
        validate(other, SCHEDULE)


@pytest.mark.parametrize(
    ("orders", "reason"),
    [
        ("0: F0 B0", "1 orders for 2 devices"),
        ("0: F0 B0\n1: F0", "B0 stands 0 times on device 1, wanted 1"),
        ("0: F0 B0 F0\n1: F0 B0", "F0 stands 2 times on device 0, wanted 1"),
        ("0: F0 F1 B0\n1: F0 B0", "F1 stands 1 times on device 0, wanted 0"),
        ("0: F0 F0c1 B0\n1: F0 B0", "F0c1 stands 1 times on device 0, wanted 0"),
        ("0: EF0 F0 B0\n1: F0 B0", "EB0.0 runs layer 0 0 times, wanted 1"),
        ("0: F0 B0 EB0\n1: F0 B0", "EF0.0 runs layer 0 0 times, wanted 1"),
        ("0: EF0.1 F0 B0 EB0\n1: F0 B0", "EF0.0 runs layer 0 0 times, wanted 1"),
        ("0: EF0 EF0.1 F0 B0 EB0\n1: F0 B0", "EF0.1 runs layer 0 2 times, wanted 1"),
        ("0: EF0 F0 B0 EB0\n1: EF0.1 F0 B0", "EF0.1 stands on device 1, but unit 1 of .*"),
        ("0: EF0 EF0.7 F0 B0 EB0\n1: F0 B0", "EF0.7 on device 0: there are 2 units and 2 layers"),
        ("0: EF0[0:1) F0 B0 EB0\n1: F0 B0", "EF0.0 runs layer 1 0 times, wanted 1"),
        ("0: EF0 F0 B0 EB0 EB0[1:2)\n1: F0 B0", "EB0.0 runs layer 1 2 times, wanted 1"),
    ],
)
def test_incomplete_schedules_are_refused(orders: str, reason: str) -> None:
    pipe = Pipeline(2, 1, encoders=(EncoderPipeline((2,)),))
    with pytest.raises(ScheduleError, match=f"^{reason}$"):
        check_complete(Schedule.parse(orders, pipe))


def test_complete_schedules_pass() -> None:
    check_complete(SCHEDULE)
    check_complete(Schedule.parse("0: F0 EF1 F1 B0 B1 EB1\n1: F0 F1 B0 B1", PIPE))
