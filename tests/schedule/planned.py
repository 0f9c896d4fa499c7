"""Schedules of the methods and their Programs, each planned once for all tests of a process."""

from __future__ import annotations

import dataclasses
import functools

from optimus_jax.schedule.lower import lower
from optimus_jax.schedule.methods import schedule
from optimus_jax.schedule.program import Program
from optimus_jax.schedule.simulate import Durations, Timing, event_driven
from optimus_jax.schedule.task import Pipeline, Schedule


@dataclasses.dataclass(frozen=True)
class Planned:
    """A schedule, its event-driven timing and its Program; F = 1, B = 2 of a whole stage."""

    durations: Durations
    schedule: Schedule
    timing: Timing
    program: Program

    @property
    def program_end(self) -> float:
        return self.program.end(self.durations)


@functools.cache
def planned(
    method: str, order: str, stages: int, microbatches: int, chunks: int, encoder: float
) -> Planned:
    pipe = Pipeline(stages, microbatches, chunks)
    durations = Durations.uniform(pipe, encoder=encoder)
    found = schedule(method, order, pipe, durations)
    return Planned(
        durations, found, event_driven(found, durations), lower(found, durations, bucket=1)
    )
