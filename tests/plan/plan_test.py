"""A plan: one configuration's schedule, sound program and predicted times, all from one source."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from optimus_jax.config import Config, from_config_dict
from optimus_jax.cost.costs import Costs, analytic
from optimus_jax.plan import plan as plan_module
from optimus_jax.plan.plan import Plan, make_plan
from optimus_jax.schedule.bubbles import bubble_report
from optimus_jax.schedule.methods import METHODS
from optimus_jax.schedule.methods import schedule as make_schedule
from optimus_jax.schedule.program import Program
from optimus_jax.schedule.simulate import Durations, event_driven
from optimus_jax.schedule.task import Schedule, ScheduleError


@pytest.fixture
def config_of(values: dict[str, Any]) -> Any:
    """Configurations of two stages and two microbatches by method."""

    def make(method: str) -> Config:
        values["model"]["llm"]["layers"] = 3
        values["train"]["batch"] = 8
        values["parallel"].update(method=method, pp=2, microbatches=2)
        return from_config_dict(values)

    return make


@pytest.mark.parametrize("method", METHODS)
def test_lanes_are_the_schedule_under_the_programs_timing(config_of: Any, method: str) -> None:
    plan = make_plan(config_of(method))
    assert tuple(tuple(task for task, *_ in lane) for lane in plan.lanes) == plan.schedule.orders
    assert plan.lanes == plan.program.time(plan.durations)
    assert plan.program_s == plan.program.end(plan.durations)
    assert plan.event_driven_s <= plan.program_s
    assert plan.event_driven_s == event_driven(plan.schedule, plan.durations).end
    assert plan.bubbles == bubble_report(plan.lanes, plan.alone)


@pytest.mark.parametrize("method", ["text_only", "phased"])
def test_the_llm_alone_is_every_methods_ceiling(config_of: Any, method: str) -> None:
    plan, text_only = make_plan(config_of(method)), make_plan(config_of("text_only"))
    assert plan.alone == text_only.lanes
    assert plan.bubbles.alone_step == text_only.program_s
    assert (plan.program_s > text_only.program_s) == (method == "phased")


def test_a_step_is_the_program_and_then_the_epilogue(config_of: Any) -> None:
    plan = make_plan(config_of("phased"))
    assert plan.durations.epilogue > 0
    assert plan.step_s == plan.program_s + plan.durations.epilogue


def test_the_method_sees_the_predicted_durations(config_of: Any) -> None:
    config = config_of("coarse")
    plan = make_plan(config)
    assert plan.costs == analytic(config)
    assert plan.durations == plan.costs.durations(config)
    expected = make_schedule("coarse", "1f1b", config.pipeline, plan.durations)
    assert plan.schedule == expected


def test_costs_that_are_given_replace_the_analytic_ones(config_of: Any) -> None:
    config = config_of("phased")
    costs = analytic(config)
    twice = scaled(costs, 2.0)
    plan, slower = make_plan(config, costs), make_plan(config, twice)
    assert slower.costs is twice
    assert slower.step_s == pytest.approx(2 * plan.step_s)
    assert slower.event_driven_s == pytest.approx(2 * plan.event_driven_s)
    assert slower.bubbles.share_filled == pytest.approx(plan.bubbles.share_filled)


def scaled(costs: Costs, factor: float) -> Costs:
    def one(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: factor * seconds for name, seconds in value.items()}
        return value if isinstance(value, str | None) else factor * value

    parts = {name: one(value) for name, value in dataclasses.asdict(costs).items()}
    kinds = {f.name: type(getattr(costs, f.name)) for f in dataclasses.fields(costs)}
    return Costs(**{n: kinds[n](**v) if isinstance(v, dict) else v for n, v in parts.items()})


def test_an_unsound_program_is_refused(config_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lower = plan_module.lower

    def without_first_task(schedule: Schedule, durations: Durations) -> Program:
        program = lower(schedule, durations)
        program.table[0] = program.columns.idle_row()
        return program

    monkeypatch.setattr(plan_module, "lower", without_first_task)
    with pytest.raises(ScheduleError):
        make_plan(config_of("phased"))


def test_the_same_configuration_gives_the_same_plan(config_of: Any) -> None:
    plans: list[Plan] = [make_plan(config_of("filled")) for _ in range(2)]
    assert str(plans[0].schedule) == str(plans[1].schedule)
    assert (plans[0].program.table == plans[1].program.table).all()
