"""The training step of a configuration over devices that need not be there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

from optimus_jax.config import Config
from optimus_jax.data.noise import random_batch
from optimus_jax.models.mllm import Mllm
from optimus_jax.parallel.mesh import Grid, make_meshes
from optimus_jax.plan.plan import make_plan
from optimus_jax.runtime.executor import TABLE_SPECS, Executor
from optimus_jax.runtime.trainer import Trainer


def lowered_step(config: Config, devices: Sequence[jax.Device], pairing: bool = True) -> Any:
    """The step that train would run on these devices (jax.stages.Lowered), from shapes alone.

    Without `pairing`, no encoder work is tied to a collective; all else is the same.
    """
    plan = make_plan(config)
    meshes = make_meshes(Grid(config.parallel.dp, config.parallel.pp), devices)
    model, slots = Mllm(config.model), plan.program.slots
    executor = Executor(model, config.pipeline, meshes, slots, config.microbatch_rows)
    trainer = Trainer(executor, config.train)
    state = _placed(
        jax.eval_shape(lambda: trainer._staged(trainer._initial(jax.random.key(0)))),
        trainer.shardings(),
    )
    tables = tuple(
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(meshes.grid, spec))
        for x, spec in zip((plan.program.table, plan.program.pattern), TABLE_SPECS, strict=True)
    )
    return trainer.train_step().lower(state, _batch(config, executor), *tables)


def _batch(config: Config, executor: Executor) -> dict[str, jax.ShapeDtypeStruct]:
    """What Executor.place_batch gives for a batch of the training data."""
    where = NamedSharding(executor.meshes.llm, Spec("dp"))
    found = {}
    for name, row in random_batch(config.model, 1).items():
        whole = np.broadcast_to(row, (config.train.batch, *row.shape[1:]))
        shape = executor.batch_shape(name, whole).shape
        found[name] = jax.ShapeDtypeStruct(shape, row.dtype, sharding=where)
    return found


def _placed(shapes: Any, shardings: Any) -> Any:
    """A tree of shapes, each with the sharding that stands there."""
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes, shardings
    )
