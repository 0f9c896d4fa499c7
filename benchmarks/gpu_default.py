"""Whole training steps of configs/digits.py on one device, in float32 and in bfloat16."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax

from optimus_jax.config import Config, from_config_dict
from optimus_jax.data.noise import random_batch
from optimus_jax.measure.rounds import by_turns
from optimus_jax.plan.plan import make_plan
from optimus_jax.runtime.compilation import quick_compile
from optimus_jax.runtime.executor import Executor
from optimus_jax.runtime.trainer import Trainer

DTYPES = "float32", "bfloat16"


def configuration(dtype: str, hardware: str) -> Config:
    """That of `train --config=configs/digits.py --config.parallel.pp=1 --config.model.dtype=...`.

    Raises ImportError without ml-collections.
    """
    from configs.digits import get_config

    values = get_config().to_dict()
    values["hardware"] = hardware
    values["parallel"]["pp"] = 1
    values["model"]["dtype"] = dtype
    return from_config_dict(values)


class Training:
    """The training step of a configuration, compiled. `compile_s` are the seconds from the traced
    function to machine code, `first_s` those of the first step after it. The batch is noise, the
    same at every step: what its numbers are has no part in the time."""

    def __init__(self, config: Config, options: dict[str, Any] | None):
        plan = make_plan(config)
        executor = Executor.of(config, plan.program.slots, jax.devices(), plan.pipeline)
        trainer = Trainer(executor, config.train)
        self.state = trainer.init()
        self.batch = executor.feed.batch(random_batch(config.model, config.train.batch))
        self.tables = executor.feed.tables(plan.program)
        self.predicted_s, self.ticks = plan.step_s, plan.program.used_ticks
        start = time.perf_counter()
        lowered = trainer.train_step(options).lower(self.state, self.batch, *self.tables)
        self.step = lowered.compile()
        self.compile_s = time.perf_counter() - start
        self.first_s = self.seconds()

    def seconds(self) -> float:
        """Of one step, from its call until all its results are there."""
        start = time.perf_counter()
        self.state, self.metrics = self.step(self.state, self.batch, *self.tables)
        jax.block_until_ready((self.state, self.metrics))
        return time.perf_counter() - start


def measure(
    hardware: str, rounds: int, small: bool, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Of each dtype: seconds of compilation, of the first step, and of a step in each round, the
    dtypes by turns; what was predicted for `hardware`; ticks of the Program; the last loss. `small`
    compiles quickly to slower code."""
    made = {}
    for dtype in DTYPES:
        say(f"compiling configs/digits.py, pp 1, {dtype}")
        made[dtype] = Training(configuration(dtype, hardware), quick_compile() if small else None)
    times = by_turns({dtype: training.seconds for dtype, training in made.items()}, rounds)
    return [
        {
            "dtype": dtype,
            "compile_s": training.compile_s,
            "first_s": training.first_s,
            "step_s": times[dtype],
            "predicted_s": training.predicted_s,
            "ticks": training.ticks,
            "loss": float(training.metrics["loss"]),
        }
        for dtype, training in made.items()
    ]
