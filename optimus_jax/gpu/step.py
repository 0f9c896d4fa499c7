"""The training step of a configuration over devices that need not be there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from optimus_jax.config import Config
from optimus_jax.data.noise import random_batch
from optimus_jax.runtime.executor import Executor
from optimus_jax.runtime.trainer import Trainer, TrainState
from optimus_jax.schedule.program import Program


def lowered_step(
    config: Config, program: Program, devices: Sequence[jax.Device], pairing: bool = True
) -> Any:
    """The step that train would run on these devices (jax.stages.Lowered), from shapes alone.

    Without `pairing`, no encoder work is tied to a collective; all else is the same.
    """
    executor = Executor.of(config, program.slots, devices, tied=pairing)
    trainer = Trainer(executor, config.train)
    state = _state(trainer)
    return trainer.train_step().lower(state, _batch(config, executor), *_tables(program, executor))


def _state(trainer: Trainer) -> TrainState:
    """The staged state of a run."""
    made = jax.eval_shape(lambda key: trainer._staged(trainer._initial(key)), jax.random.key(0))
    return jax.tree.map(_placed, made, trainer.shardings())


def _batch(config: Config, executor: Executor) -> dict[str, jax.ShapeDtypeStruct]:
    """What Executor.place_batch gives for a batch of the training data."""
    found = {}
    rows = random_batch(config.model, 1)
    for name, spec in executor.batch_specs.items():
        row = rows[name]
        whole = np.broadcast_to(row, (config.train.batch, *row.shape[1:]))
        found[name] = _placed(
            jax.eval_shape(executor.batch_shape, whole), NamedSharding(executor.meshes.llm, spec)
        )
    return found


def _tables(program: Program, executor: Executor) -> list[jax.ShapeDtypeStruct]:
    """What Executor.place_tables gives."""
    tables = program.table, program.pattern, program.prologue, program.epilogue
    return [
        _placed(x, NamedSharding(executor.meshes.mesh, spec))
        for x, spec in zip(tables, executor.table_specs, strict=True)
    ]


def _placed(x: Any, where: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
