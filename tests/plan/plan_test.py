"""A plan: one configuration's schedule, sound program and predicted times, all from one source."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from optimus_jax.config import Config, EmulateConfig, from_config_dict
from optimus_jax.cost.analytic import analytic
from optimus_jax.cost.costs import Costs, emulated
from optimus_jax.plan import plan as plan_module
from optimus_jax.plan.plan import Plan, make_plan, pipeline_for
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
    assert plan.pipeline == plan.program.pipeline


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


def scaled(costs: Any, factor: float) -> Any:
    """All seconds in a tree of dataclasses times a factor."""
    if dataclasses.is_dataclass(costs):
        parts = {f.name: scaled(getattr(costs, f.name), factor) for f in dataclasses.fields(costs)}
        return type(costs)(**parts)  # type: ignore[operator]
    if isinstance(costs, dict):
        return {name: scaled(part, factor) for name, part in costs.items()}
    return costs if isinstance(costs, str | bool | None) else factor * costs


def costs_of(config: Config, **changes: Any) -> Costs:
    """Emulated costs with some that are not emulated."""
    return dataclasses.replace(emulated(config), **changes)


def test_balanced_runs_on_a_pipeline_that_it_cuts_by_the_costs(values: dict[str, Any]) -> None:
    """Four encoder layers of 6 and four LLM layers of 30 for each microbatch: 84 and 60 is best;
    with the encoder on a stage of its own it would be 24 and 120."""
    values["model"]["encoder"]["layers"], values["model"]["llm"]["layers"] = 4, 4
    values["train"]["batch"] = 16
    values["parallel"].update(pp=2, microbatches=4)
    values["emulate"] = {"chunk_forward_s": 20.0, "encoder": 0.4, "encoder_backward": 0.8}
    config = from_config_dict(values)
    plan = make_plan(config, emulated(config), "balanced")
    assert plan.pipeline == pipeline_for(config, emulated(config), "balanced")
    assert plan.pipeline.llm_layers == (2, 2)
    (encoder,) = plan.pipeline.encoders
    assert (encoder.layers, encoder.units) == ((4, 0), 1)
    assert plan.durations.forward == pytest.approx((20.0, 20.0))
    assert sum(plan.durations.encoders[0].forward) == pytest.approx(8.0), "a whole microbatch"
    # stage 0 starts at 0, 28, 144 and 228 on the four forwards, and waits for the last gradient:
    # stage 1 gets the last activation at 256 and has 60 of work
    assert plan.step_s == pytest.approx(256 + 60 + 40 + 16)
    small = {"chunk_forward_s": 20.0, "encoder": 4.0, "encoder_backward": 8.0}
    other = dataclasses.replace(config, emulate=EmulateConfig(**small))
    plan = make_plan(other, emulated(other), "balanced")
    assert plan.pipeline.encoders[0].layers == (3, 1), "a slow encoder takes more than a stage"
    assert plan.pipeline.llm_layers == (0, 4)
    grid = other.on(plan.pipeline).parallel
    assert (grid.encoder.pp, grid.pp) == (2, 2)
    assert config.on(config.pipeline) == config


def test_balanced_has_one_encoder(values: dict[str, Any]) -> None:
    own = {"layers": 2, "width": 30, "heads": 3, "hidden": 50, "patch": 4, "input": "audio"}
    values["model"] |= {"more_encoders": {"ears": own}, "audio_frames": 16, "audio_bands": 5}
    with pytest.raises(ScheduleError, match="balanced runs one encoder, the model has 2"):
        make_plan(from_config_dict(values), method="balanced")


def test_a_step_has_the_collectives_around_its_tasks(config_of: Any) -> None:
    config = config_of("text_only")
    bare = make_plan(config, costs_of(config))
    around = make_plan(config, costs_of(config, gather=0.25, scatter=0.5, epilogue=1.0))
    assert around.step_s == pytest.approx(bare.step_s + 0.25 + 0.5 + 1.0)
    assert around.bubbles.alone_step == around.bubbles.step == around.program_s
    assert around.bubbles.causes["dp_gather"].alone == pytest.approx(2 * 0.25)
    assert "dp_gather" not in bare.bubbles.causes


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
