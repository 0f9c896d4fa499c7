"""Fully sharded data parallelism: the sequential model under plain jit, weights cut over devices.

Each device takes its share of the rows through the whole model; XLA gathers each layer's weights
when they are needed and scatters their gradients. Layers are computed again in the backward where
the executor's plan for the LLM computes them again.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

from optimus_jax.config import Config
from optimus_jax.data.noise import random_batch
from optimus_jax.errors import UserError
from optimus_jax.models.mllm import Mllm
from optimus_jax.optimizer import make_optimizer
from optimus_jax.parallel.mesh import Grid, make_meshes
from optimus_jax.runtime.compilation import quick_compile
from optimus_jax.runtime.feed import put_global


class Fsdp:
    """The training step of a configuration without its pipeline: same model, batch, optimiser.

    Raises UserError if the rows of the batch do not divide among the devices.
    """

    def __init__(self, config: Config):
        grid = make_meshes(Grid.of(config), jax.devices()).mesh
        if config.train.batch % grid.size:
            raise UserError(
                f"fsdp: {config.train.batch} rows do not divide among {grid.size} devices"
            )
        again = config.parallel.recompute == "full"
        model, tx = Mllm(config.model, recompute=again), make_optimizer(config.train)
        rows = NamedSharding(grid, Spec(grid.axis_names))
        batch = random_batch(config.model, config.train.batch)
        self.batch = {name: put_global(x, rows) for name, x in batch.items()}

        def initial(key: jax.Array) -> tuple[Any, Any]:
            params = model.init(key)
            return params, tx.init(params)

        def cut(x: jax.ShapeDtypeStruct) -> NamedSharding:
            """Along the last dimension that divides: the first of a stack counts layers."""
            for k in reversed(range(x.ndim)):
                if x.shape[k] % grid.size == 0:
                    return NamedSharding(grid, Spec(*[None] * k, grid.axis_names))
            return NamedSharding(grid, Spec())

        key = jax.random.key(config.train.seed)
        where = jax.tree.map(cut, jax.eval_shape(initial, key))
        make = jax.jit(initial, out_shardings=where, compiler_options=quick_compile())
        self.state = make(key)

        def update(state: tuple[Any, Any], batch: Any) -> tuple[Any, jax.Array]:
            params, optimizer = state
            loss, grads = jax.value_and_grad(model.loss)(params, batch)
            grads, _ = optax.clip_by_global_norm(config.train.clip).update(
                grads, optax.EmptyState()
            )
            updates, optimizer = tx.update(grads, optimizer, params)
            return (optax.apply_updates(params, updates), optimizer), loss

        whole = NamedSharding(grid, Spec())
        self._step = jax.jit(update, donate_argnums=0, out_shardings=(where, whole))

    def step(self) -> jax.Array:
        """One training step; its loss, there when it is over."""
        self.state, loss = self._step(self.state, self.batch)
        jax.block_until_ready((self.state, loss))
        return loss

    def seconds(self) -> float:
        start = time.perf_counter()
        self.step()
        return time.perf_counter() - start
