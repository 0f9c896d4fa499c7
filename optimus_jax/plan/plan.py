"""Plan: what a configuration will do, decided and predicted before anything compiles."""

from __future__ import annotations

import dataclasses

from optimus_jax.config import Config
from optimus_jax.cost.analytic import analytic
from optimus_jax.cost.costs import Costs
from optimus_jax.schedule.balanced import balanced_pipeline
from optimus_jax.schedule.bubbles import BubbleReport, Lane, bubble_report
from optimus_jax.schedule.lower import lower
from optimus_jax.schedule.methods import schedule as make_schedule
from optimus_jax.schedule.program import Program
from optimus_jax.schedule.simulate import Durations, event_driven
from optimus_jax.schedule.task import Pipeline, Schedule, ScheduleError
from optimus_jax.schedule.validate import validate

BALANCED = "balanced"  # the method that cuts a pipeline of its own


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
    llm: tuple[Schedule, Durations]  # of the LLM alone

    @property
    def llm_alone(self) -> Plan:
        """The plan of the LLM alone, by the same seconds."""
        return predicted(self.costs, *self.llm, self.llm)

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline that the Program runs on: the configuration's, or that of `balanced`."""
        return self.program.pipeline

    @property
    def program_s(self) -> float:
        """Predicted seconds of the tick program, with the collectives around it that encoder tasks
        may run beside."""
        return self.bubbles.step

    @property
    def step_s(self) -> float:
        """Predicted seconds of a training step: the program, then reduction and optimiser."""
        return self.program_s + self.durations.epilogue


def make_plan(
    config: Config,
    costs: Costs | None = None,
    method: str | None = None,
    pipe: Pipeline | None = None,
) -> Plan:
    """The plan of a checked configuration, with its method or another, on the pipeline that the
    method runs on or a given one.

    Raises ScheduleError if its program is unsound, or if the method cannot run on its pipeline.
    """
    costs, method = costs or analytic(config), method or config.parallel.method
    pipe, order = pipe or pipeline_for(config, costs, method), config.parallel.order
    durations, own = costs.durations(config, pipe), costs.durations(config)
    schedule = make_schedule(method, order, pipe, durations)
    return predicted(
        costs, schedule, durations, (make_schedule("text_only", order, config.pipeline, own), own)
    )


def predicted(
    costs: Costs, schedule: Schedule, durations: Durations, llm: tuple[Schedule, Durations]
) -> Plan:
    """The plan of a schedule whose tasks take `durations`, beside the LLM alone.

    Raises ScheduleError if its program is unsound.
    """
    program, alone, own = lower(schedule, durations), lower(*llm), llm[1]
    validate(program, schedule)
    lanes, alone_lanes = program.time(durations), alone.time(own)
    ends = program.end(durations), alone.end(own)
    return Plan(
        costs=costs,
        durations=durations,
        schedule=schedule,
        program=program,
        event_driven_s=event_driven(schedule, durations).end,
        lanes=list(lanes),
        alone=list(alone_lanes),
        bubbles=bubble_report(lanes, alone_lanes, (durations, program.pipeline), ends),
        llm=llm,
    )


def pipeline_for(config: Config, costs: Costs, method: str) -> Pipeline:
    """The pipeline that a method runs on: the configuration's own, or the one that `balanced` cuts
    by these costs.

    Raises ScheduleError if there are several encoders, or too few layers to cut.
    """
    if method != BALANCED:
        return config.pipeline
    pipe, durations = config.pipeline, costs.durations(config)
    if len(pipe.encoders) != 1:
        raise ScheduleError(f"{BALANCED} runs one encoder, the model has {len(pipe.encoders)}")
    llm = [sum(dataclasses.astuple(costs.llm_layer))] * sum(pipe.llm_layers)
    llm[0] += sum(dataclasses.astuple(costs.llm_embedding))
    llm[-1] += costs.head
    times, units = durations.encoders[0], pipe.encoders[0].units
    encoder = [units * (f + b) for f, b in zip(times.forward, times.backward, strict=True)]
    return balanced_pipeline(
        pipe.stages, pipe.microbatches, pipe.chunks, encoder, llm, cap=pipe.cap
    )
