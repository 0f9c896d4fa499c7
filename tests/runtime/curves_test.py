"""One training run under three plans: the same loss curve, whatever the plan."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from configs.digits import get_config
from optimus_jax.config import Config, from_config_dict
from optimus_jax.runtime.compilation import quick_compile
from optimus_jax.runtime.executor import Executor
from optimus_jax.runtime.trainer import Trainer
from optimus_jax.schedule.lower import lower
from optimus_jax.schedule.methods import schedule
from optimus_jax.schedule.program import Program
from optimus_jax.schedule.simulate import Durations
from optimus_jax.schedule.validate import validate
from optimus_jax.train import example_batches

PLANS: dict[str, dict[str, Any]] = {
    "one device": {"method": "encoder_first"},
    "stages, shards, ZeRO": {
        "pp": 2,
        "tp": 2,
        "encoder": {"pp": 2},
        "zero": True,
        "method": "filled",
    },
    "replicas, chunks, nothing recomputed": {
        "dp": 2,
        "pp": 2,
        "tp": 2,
        "chunks": 2,
        "encoder": {"tp": 2, "recompute": "none"},
        "recompute": "none",
        "zero": False,
        "method": "phased",
    },
}


STEPS = 200
# Plans sum in different orders, in float32, whose numbers are 1.2e-7 apart, relatively. Over 200
# steps losses were seen to differ by up to 2.7e-7.
TOLERANCE = 2e-6


def config_of(plan: dict[str, Any], llm: dict[str, Any] | None = None) -> Config:
    """One or two digits, a model that trains in milliseconds a step."""
    values = get_config().to_dict()
    values["data"] |= {"digits_high": 2}
    values["model"] |= {
        "image_height": 8,
        "image_width": 20,
        "text_length": 6,
        "vocabulary": 84,
        "projector_hidden": 16,
        "encoder": {"layers": 2, "width": 16, "heads": 2, "hidden": 32, "patch": 4},
        "llm": {"layers": 4, "width": 16, "heads": 2, "hidden": 32, **(llm or {})},
    }
    values["parallel"] |= {"pp": 1, "microbatches": 2, **plan}
    values["train"] |= {"batch": 16, "steps": STEPS, "warmup": STEPS // 10}
    return from_config_dict(values)


def trainer_of(plan: dict[str, Any]) -> tuple[Trainer, Program]:
    """What trains under a plan; with ZeRO, every weight is cut that can be."""
    config = config_of(plan)
    pipe, zero = config.pipeline, config.parallel.zero
    durations = dataclasses.replace(
        Durations.uniform(pipe, encoder=0.7), gather=0.5, scatter=0.5, overlap=zero
    )
    order = schedule(config.parallel.method, "1f1b", pipe, durations)
    program = lower(order, durations)
    validate(program, order)
    executor = Executor.of(config, program.slots, jax.devices(), poison=True)
    if zero:
        executor = dataclasses.replace(executor, zero=0)
    return Trainer(executor, config.train), program


def losses(plan: dict[str, Any], steps: int) -> np.ndarray:
    """Of the first steps, [steps]."""
    (trainer, program), config = trainer_of(plan), config_of(plan)
    state, step = trainer.init(), trainer.train_step(quick_compile())
    tables = trainer.executor.feed.tables(program)
    batches, rows = example_batches(config, "train", config.train.batch), range(config.train.batch)
    found = []
    for n in range(steps):
        batch = trainer.executor.feed.batch(batches.rows(n, rows))
        state, metrics = step(state, batch, *tables)
        found.append(float(metrics["loss"]))
    assert step._cache_size() == 1 and int(metrics["nans"].sum()) == 0
    return np.array(found)


def check_curves(steps: int) -> None:
    curves = {name: losses(plan, steps) for name, plan in PLANS.items()}
    first, *others = curves.values()
    assert first[-1] < 0.9 * first[0]  # it learns
    for name, curve in zip(list(PLANS)[1:], others, strict=True):
        np.testing.assert_allclose(curve, first, rtol=TOLERANCE, err_msg=name)


@pytest.mark.slow
def test_a_whole_run_has_the_same_losses_under_every_plan() -> None:
    check_curves(STEPS)
