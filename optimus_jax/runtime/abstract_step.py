"""The training step of a configuration, traced from shapes: nothing is on any device yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from optimus_jax.config import Config
from optimus_jax.data.noise import random_batch
from optimus_jax.runtime.executor import Executor
from optimus_jax.runtime.feed import put_shape
from optimus_jax.runtime.trainer import Trainer
from optimus_jax.schedule.program import Program


def traced_step(
    config: Config, program: Program, devices: Sequence[jax.Device], **options: Any
) -> tuple[Executor, Any]:
    """The executor, and the step that train would run on these devices (jax.stages.Traced), which
    need not be there. `options` are the executor's."""
    executor = Executor.of(config, program.slots, devices, program.pipeline, **options)
    trainer = Trainer(executor, config.train)
    rows = {
        name: np.broadcast_to(row, (config.train.batch, *row.shape[1:]))
        for name, row in random_batch(config.model, 1).items()
    }
    state = jax.tree.map(put_shape, trainer.staged_shapes(), trainer.shardings())
    feed = executor.feed.batch(rows, put_shape), *executor.feed.tables(program, put_shape)
    return executor, trainer.train_step().trace(state, *feed)
