"""The training step of a configuration, traced from shapes: nothing is on any device yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from optimus_jax.config import Config
from optimus_jax.data.noise import random_batch
from optimus_jax.runtime.executor import Executor
from optimus_jax.runtime.trainer import Trainer
from optimus_jax.schedule.program import Program


def traced_step(
    config: Config, program: Program, devices: Sequence[jax.Device], **options: Any
) -> tuple[Executor, Any]:
    """The executor, and the step that train would run on these devices (jax.stages.Traced).
    `options` are the executor's."""
    executor = Executor.of(config, program.slots, devices, **options)
    trainer = Trainer(executor, config.train)
    state = jax.eval_shape(lambda key: trainer._staged(trainer._initial(key)), jax.random.key(0))
    state = jax.tree.map(_placed, state, trainer.shardings())
    batch = {}
    rows = random_batch(config.model, 1)
    for name, spec in executor.batch_specs.items():
        whole = np.broadcast_to(rows[name], (config.train.batch, *rows[name].shape[1:]))
        where = NamedSharding(executor.meshes.llm, spec)
        batch[name] = _placed(jax.eval_shape(executor.batch_shape, whole), where)
    tables = program.table, program.pattern, program.prologue, program.epilogue
    placed = [
        _placed(x, NamedSharding(executor.meshes.mesh, spec))
        for x, spec in zip(tables, executor.table_specs, strict=True)
    ]
    return executor, trainer.train_step().trace(state, batch, *placed)


def _placed(x: Any, where: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
