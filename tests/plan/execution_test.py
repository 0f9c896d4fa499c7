"""Plans that the planner writes, on the executor: read back, proved, run, and refused in words."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from optimus_jax.config import from_config_dict
from optimus_jax.config_checks import ConfigError
from optimus_jax.cost.analytic import analytic
from optimus_jax.errors import UserError
from optimus_jax.plan import __main__ as command
from optimus_jax.plan.answer import answer as answer_to
from optimus_jax.plan.cluster import Assumptions, Cluster, EncoderSpec, LlmPlan, LlmSpec
from optimus_jax.plan.execution import (
    KEY,
    Execution,
    configured,
    load_execution,
    of_plan,
    planned,
    written,
)
from optimus_jax.plan.outcome import Answer
from optimus_jax.plan.plan import make_plan
from optimus_jax.plan.realisation import executed, execution_values
from optimus_jax.runtime.comparison import Bench
from optimus_jax.runtime.small_plan import SmallPlan, Tower
from optimus_jax.schedule.program import fit_together
from optimus_jax.schedule.task import Pipeline, ScheduleError

LLM = LlmSpec("own", 128, layers=4, width=64, heads=4, hidden=256)
VIT = EncoderSpec("image", 256, 16, layers=4, width=64, heads=4, hidden=256)
# An LLM layer waits as long for its collectives as it computes.
ASSUME = Assumptions(efficiency=5e-6, tp_collective_s=50.0, dp_exposed_s=1e-3)


@functools.cache
def answer(stages: int, tp: int, chunks: int = 1, dp: int = 1, tokens: int = 256) -> Answer:
    """Two ranks of two devices, four microbatches of 8 samples."""
    encoder = dataclasses.replace(VIT, stages=stages, tp=tp, tokens=tokens)
    plan = LlmPlan(dp=dp, pp=2, tp=2, chunks=chunks, microbatch=8)
    return answer_to(Cluster("h100", 4 * dp, 32 * dp, LLM, {"image": encoder}, plan, ASSUME))


def through_file(folder: pathlib.Path, found: Answer, method: str) -> Execution:
    methods = {method: written(executed(found, method))}
    values = {KEY: execution_values(found)}
    values[KEY]["methods"] |= methods
    (folder / "plan.json").write_text(json.dumps(values))
    return load_execution(folder / "plan.json", method)


def test_a_plan_comes_back_from_its_file(tmp_path: pathlib.Path) -> None:
    found = answer(2, 1)
    for method in ("fine", "filled"):
        made = executed(found, method)
        read = through_file(tmp_path, found, method)
        assert read.schedule == made.schedule
        for name in ("method", "dp", "tp", "rows", "encoders", "durations", "planned_s"):
            assert getattr(read, name) == getattr(made, name)
        assert (read.dp, read.pipeline.stages, read.tp, read.encoders) == (1, 2, 2, ((2, 1),))
        assert (read.pipeline.microbatches, read.rows, read.devices) == (4, 8, 4)


BESIDE = ("coarse", "fine", "filled", "phased")
INSIDE = ("encoder_first", "encoder_first_tuned", "balanced")


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (1, 2, 2), (2, 1, 1, 2), (1, 1, 2, 1, 64)])
def test_every_method_has_a_sound_program(sizes: tuple[int, ...]) -> None:
    found = answer(*sizes)
    for method in (*BESIDE, *INSIDE):
        if method == "balanced" and sizes == (1, 2, 2):
            with pytest.raises(ScheduleError, match="the first 2 virtual stages only, not"):
                executed(found, method)
            continue
        made = executed(found, method)
        program = made.program()  # validated
        assert made.event_driven_s <= program.end(made.durations) + 1e-9
        # half of these steps is time beside collectives, of which whole layers use less
        most = 1.16 if method in BESIDE else 1.001
        assert made.event_driven_s < most * made.planned_s, f"{method} on {sizes}"


def test_where_slots_are_not_used_the_step_is_the_planners() -> None:
    found = answer(1, 2, tokens=64)
    for method in ("coarse", "fine", "filled", "phased"):
        made = executed(found, method)
        assert made.program().end(made.durations) == pytest.approx(made.planned_s, rel=1e-3)


def test_copies_are_lanes() -> None:
    """Two copies of a pipeline on a rank are one of two lanes, which takes half the time."""
    one, two = executed(answer(1, 2), "coarse"), executed(answer(1, 1), "coarse")
    assert two.encoders == ((1, 1),) and one.encoders == ((1, 2),)
    # without the collectives of two shards a layer takes a little less
    times = [made.durations.encoders[0].forward[0] for made in (one, two)]
    assert times[1] == pytest.approx(times[0], rel=0.01)


@dataclasses.dataclass(frozen=True)
class Planned(SmallPlan):
    """A small model on the pipeline of a plan."""

    own: Pipeline | None = None

    @property
    def pipeline(self) -> Pipeline:
        assert self.own
        return self.own


def ranges(execution: Execution) -> bool:
    tasks = (task for order in execution.schedule.orders for task in order)
    return any(task.encoder_part and task.encoder_part.layers for task in tasks)


# Sizes, methods, and what their schedules must have.
RUNS = {
    "two encoder stages": ((2, 2), ("fine", "filled"), {"fused"}),
    "two chunks": ((1, 2, 2, 1, 512), ("fine",), {"fused", "ranges"}),
    "replicas and lanes": ((1, 1, 1, 2, 64), ("coarse", "filled"), {"units"}),
}


def kinds(execution: Execution) -> set[str]:
    found = {"fused"} if execution.fused else set()
    for task in (task for order in execution.schedule.orders for task in order):
        part = task.encoder_part
        found |= {"ranges"} if part and part.layers else set()
        found |= {"units"} if part and len(part.units) == 1 else set()
    return found


@pytest.mark.parametrize("name", RUNS)
def test_the_executor_runs_what_the_planner_writes(name: str, tmp_path: pathlib.Path) -> None:
    sizes, methods, wanted = RUNS[name]
    found = answer(*sizes)
    executions = [through_file(tmp_path, found, method) for method in methods]
    assert set().union(*map(kinds, executions)) >= wanted
    by_pipe: dict[Pipeline, list[Execution]] = defaultdict(list)
    for execution in executions:
        by_pipe[execution.pipeline].append(execution)
    for pipe, mine in by_pipe.items():
        first, ((pp, tp),) = mine[0], mine[0].encoders
        small = Planned(
            pipe.stages,
            first.dp,
            pipe.chunks,
            pipe.microbatches,
            first.tp,
            (Tower(pp=pp, tp=tp),),
            zero=True,
            fuse=any(one.fused for one in mine),
            own=pipe,
        )
        bench, programs = Bench(small), fit_together([one.program() for one in mine])
        executor = bench.executor(programs[0])
        step, params = executor.gradient_step(bench.options), bench.staged(executor, bench.params)
        batch = executor.feed.batch(bench.batch)
        for one, program in zip(mine, programs, strict=True):
            loss, grads, _ = step(params, batch, *executor.feed.tables(program))
            errors = bench.errors(loss, grads, images=True)
            assert errors[0] < 1e-6 and errors[1] < 1e-5, f"{one.method}: {errors}"


@pytest.fixture
def fitting(values: dict[str, Any]) -> dict[str, Any]:
    """Settings whose model has the layers of the plan."""
    values["model"]["llm"]["layers"] = values["model"]["encoder"]["layers"] = 4
    values["model"].update(vocabulary=84, text_length=10)
    values["train"]["batch"] = 32
    return values


def test_a_configuration_takes_the_plans_sizes(fitting: dict[str, Any]) -> None:
    execution = executed(answer(2, 2), "filled")
    config = configured(from_config_dict(fitting), execution, devices=8)
    p = config.parallel
    assert (p.dp, p.pp, p.tp, p.chunks, p.microbatches) == (1, 2, 2, 1, 4)
    assert (p.encoder.pp, p.encoder.tp, p.method, p.fuse) == (2, 2, "filled", True)
    plan = planned(config, execution)
    assert plan.schedule == execution.schedule and plan.pipeline == execution.pipeline
    assert plan.event_driven_s == execution.event_driven_s <= plan.program_s
    assert "plan" in plan.costs.source
    own = analytic(config)
    there = planned(config, execution, own)
    assert there.schedule == execution.schedule and there.costs == own
    assert there.durations == own.durations(config, execution.pipeline) != plan.durations


def test_a_training_runs_own_plan_comes_back(
    fitting: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    fitting["parallel"].update(dp=1, pp=2, tp=1, chunks=1, microbatches=4, method="filled")
    config = from_config_dict(fitting)
    plan = make_plan(config)
    values = {"method": "filled", "methods": {"filled": written(of_plan(config, plan))}}
    command.write_plan({KEY: values}, tmp_path)
    execution = load_execution(tmp_path / "plan.json")
    assert configured(config, execution) == config
    again = planned(config, execution)
    assert again.schedule == plan.schedule and again.program_s == plan.program_s


Change = Callable[[dict[str, Any]], Any]


def _other_model(values: dict[str, Any]) -> None:
    values["model"]["llm"]["layers"] = 6


def _other_encoder(values: dict[str, Any]) -> None:
    values["model"]["encoder"]["layers"] = 3


def _other_batch(values: dict[str, Any]) -> None:
    values["train"]["batch"] = 30


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_other_model, ("4 layers", "config.model.llm.layers is 6")),
        (_other_encoder, ("4 layers of encoder 'vision', not 3",)),
        (_other_batch, ("30 rows", "4 microbatches = 4 parts", "28 or 32")),
    ],
)
def test_what_does_not_fit_is_words(
    fitting: dict[str, Any], change: Change, words: tuple[str, ...]
) -> None:
    values = json.loads(json.dumps(fitting))
    before = from_config_dict(values)
    change(values)
    config = dataclasses.replace(
        before,
        model=dataclasses.replace(
            before.model,
            llm=dataclasses.replace(before.model.llm, layers=values["model"]["llm"]["layers"]),
            encoder=dataclasses.replace(
                before.model.encoder, layers=values["model"]["encoder"]["layers"]
            ),
        ),
        train=dataclasses.replace(before.train, batch=values["train"]["batch"]),
    )
    with pytest.raises(UserError) as error:
        configured(config, executed(answer(2, 2), "filled"))
    for word in words:
        assert word in str(error.value)


def test_too_few_devices_and_odd_sizes_are_words(fitting: dict[str, Any]) -> None:
    execution = executed(answer(2, 2), "filled")
    with pytest.raises(UserError, match=r"4 devices \(dp 1 x pp 2 x tp 2\), here are 2"):
        configured(from_config_dict(fitting), execution, devices=2)
    config = from_config_dict(fitting)
    llm = dataclasses.replace(config.model.llm, heads=1, hidden=255)
    odd = dataclasses.replace(config, model=dataclasses.replace(config.model, llm=llm))
    with pytest.raises(ConfigError, match="do not divide among 2 tensor shards"):
        configured(odd, execution)


def _break(found: dict[str, Any], name: str, value: Any) -> None:
    found[KEY]["methods"]["filled"][name] = value


WRONG: dict[str, tuple[Change, str]] = {
    "no execution": (lambda f: f.pop(KEY), "no 'execution'; python -m optimus_jax.plan"),
    "another method": (lambda f: f[KEY].update(method="zb"), "no method 'zb', only filled"),
    "lines": (lambda f: _break(f, "schedule", ["0: F0"]), "1 lines of schedule, .* has 2"),
    "task": (lambda f: _break(f, "schedule", ["0: X0", "1: F0"]), "X0"),
    "shards": (lambda f: _break(f, "tp", 3), "tp 2 does not divide the LLM's 3"),
    "missing": (lambda f: f[KEY]["methods"]["filled"].pop("dp"), "'dp' is missing"),
    "refused": (
        lambda f: f[KEY]["methods"].update(filled={"refused": "it is frozen"}, fine={}),
        "does not run filled: it is frozen; it could run fine",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_words(name: str, tmp_path: pathlib.Path) -> None:
    change, words = WRONG[name]
    execution = executed(answer(2, 2), "filled")
    found = {KEY: {"method": "filled", "methods": {"filled": written(execution)}}}
    found = json.loads(json.dumps(found))
    change(found)
    (tmp_path / "plan.json").write_text(json.dumps(found))
    with pytest.raises(UserError, match=words):
        load_execution(tmp_path / "plan.json")
    with pytest.raises(UserError, match="No such file"):
        load_execution(tmp_path / "none.json")


def test_a_task_that_is_missing_is_noticed() -> None:
    execution = executed(answer(2, 2), "filled")
    orders = (execution.schedule.orders[0][1:], *execution.schedule.orders[1:])
    less = dataclasses.replace(execution.schedule, orders=orders)
    with pytest.raises(ScheduleError):
        dataclasses.replace(execution, schedule=less).program()


def test_what_the_executor_does_not_run_is_said() -> None:
    found = answer(2, 2)
    with pytest.raises(ScheduleError, match="trains no encoder"):
        executed(found, "text_only")
    if "filled_zb" in found.outcomes:
        with pytest.raises(ScheduleError, match="whole backwards"):
            executed(found, "filled_zb")
    frozen = dataclasses.replace(found.cluster, llm=dataclasses.replace(LLM, frozen=True))
    values = execution_values(dataclasses.replace(found, cluster=frozen))
    assert "frozen" in values["methods"]["filled"]["refused"]
