"""Plans from a file: the configurations that they fit, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from optimus_jax.config import from_config_dict
from optimus_jax.config_checks import ConfigError
from optimus_jax.cost.analytic import analytic
from optimus_jax.errors import UserError
from optimus_jax.plan import __main__ as command
from optimus_jax.plan.execution import (
    KEY,
    configured,
    load_execution,
    of_plan,
    planned,
    written,
)
from optimus_jax.plan.plan import make_plan
from optimus_jax.plan.realisation import executed, execution_values
from optimus_jax.schedule.task import ScheduleError
from tests.plan.execution_test import LLM, answer


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
    "no replica": (lambda f: _break(f, "dp", 0), "dp must be positive, got 0"),
    "no shard": (
        lambda f: _break(f, "encoders", [{"pp": 2, "tp": 0}]),
        "encoder 0.* tp 0 does not divide the LLM's 2",
    ),
    "a number": (lambda f: f[KEY]["methods"].update(filled=3), "no method 'filled'"),
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
