"""Plan: what a configuration will do, decided and predicted before anything compiles."""

from __future__ import annotations

import dataclasses

from optimus_jax.config import Config
from optimus_jax.cost.costs import Costs, analytic
from optimus_jax.schedule.bubbles import BubbleReport, Lane, bubble_report
from optimus_jax.schedule.lower import lower
from optimus_jax.schedule.methods import schedule as make_schedule
from optimus_jax.schedule.program import Program
from optimus_jax.schedule.simulate import Durations, event_driven
from optimus_jax.schedule.task import Schedule
from optimus_jax.schedule.validate import validate


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """A schedule with the Program that runs it and its predicted times.

    `lanes` and `alone` are the tasks of each device with start and end, under the Program's timing
    rule, for this method and for the LLM alone. `event_driven_s` is the time of the schedule with
    asynchronous transfers. No figure here is measured; `costs.source` says where seconds come from.
    """

    costs: Costs
    durations: Durations
    schedule: Schedule
    program: Program
    event_driven_s: float
    lanes: list[Lane]
    alone: list[Lane]
    bubbles: BubbleReport

    @property
    def program_s(self) -> float:
        """Predicted seconds of the tick program."""
        return self.bubbles.step

    @property
    def step_s(self) -> float:
        """Predicted seconds of a training step: the program, then reduction and optimiser."""
        return self.program_s + self.durations.epilogue


def make_plan(config: Config, costs: Costs | None = None, method: str | None = None) -> Plan:
    """The plan of a checked configuration, with its method or another.

    Raises ScheduleError if its program is unsound.
    """
    costs = costs or analytic(config)
    pipe, durations, order = config.pipeline, costs.durations(config), config.parallel.order
    schedule = make_schedule(method or config.parallel.method, order, pipe, durations)
    program = lower(schedule, durations)
    validate(program, schedule)
    alone = lower(make_schedule("text_only", order, pipe, durations), durations).time(durations)
    lanes = program.time(durations)
    return Plan(
        costs=costs,
        durations=durations,
        schedule=schedule,
        program=program,
        event_driven_s=event_driven(schedule, durations).end,
        lanes=list(lanes),
        alone=list(alone),
        bubbles=bubble_report(lanes, alone),
    )
