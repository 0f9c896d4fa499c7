"""The jitted training step and the state that it updates."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

from optimus_jax.config import TrainConfig
from optimus_jax.models.weights import Params
from optimus_jax.optimizer import clip, global_norm, make_optimizer
from optimus_jax.parallel import sharding
from optimus_jax.parallel.stages import stage_tree, unstage_tree
from optimus_jax.runtime.compilation import quick_compile
from optimus_jax.runtime.executor import Executor


class TrainState(NamedTuple):
    """float32 weights, AdamW's state, and the number of steps done."""

    params: Params
    optimizer: Any
    step: jax.Array


def map_weights(function: Callable[[Any], Any], tree: Any, others: Callable[[Any], Any]) -> Any:
    """Applies `function` to each subtree that is laid out like the weights (the weights themselves
    and the optimiser's moments), and `others` to every other leaf."""

    def is_weights(x: Any) -> bool:
        return isinstance(x, dict) and x.keys() == {"encoders", "llm"}

    def one(x: Any) -> Any:
        return function(x) if is_weights(x) else others(x)

    return jax.tree.map(one, tree, is_leaf=is_weights)


class Trainer:
    """Makes, stages and updates the training state of one executor."""

    def __init__(self, executor: Executor, config: TrainConfig):
        self.executor, self.config = executor, config
        self.tx = make_optimizer(config)

    def _initial(self, key: jax.Array) -> TrainState:
        params = self.executor.model.init(key)
        return TrainState(params, self.tx.init(params), jnp.zeros((), jnp.int32))

    def abstract(self) -> TrainState:
        """Shapes and dtypes of the stage-free state, as it stands on disk, and how each array lies
        on the devices while it is moved there or back."""

        def stored(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            where = sharding.storage_sharding(x.shape, self.executor.meshes.mesh)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

        return jax.tree.map(stored, jax.eval_shape(self._initial, jax.random.key(0)))

    def staged_shapes(self) -> TrainState:
        """Shapes and dtypes of the staged state."""
        return jax.eval_shape(
            lambda key: self._staged(self._initial(key)), jax.random.key(self.config.seed)
        )

    def shardings(self) -> TrainState:
        """Shardings of the staged state, each module on its own mesh."""
        weights = self.executor.weight_shardings()
        state = jax.eval_shape(self._initial, jax.random.key(0))
        whole = NamedSharding(self.executor.meshes.mesh, Spec())
        return map_weights(lambda _: weights, state, lambda _: whole)

    def init(self) -> TrainState:
        """The staged state before the first step; the same for every plan, to rounding."""
        make = jax.jit(
            lambda key: self._staged(self._initial(key)),
            out_shardings=self.shardings(),
            compiler_options=quick_compile(),
        )
        return make(jax.random.key(self.config.seed))

    def stage(self, state: TrainState) -> TrainState:
        """A stage-free state, staged."""
        made = jax.jit(
            self._staged, out_shardings=self.shardings(), compiler_options=quick_compile()
        )
        return made(state)

    def unstage(self, state: TrainState) -> TrainState:
        """A stage-free copy of the staged state, to be saved."""
        return self._unstage(state)

    @functools.cached_property
    def _unstage(self) -> Callable[[TrainState], TrainState]:
        where = jax.tree.map(lambda x: x.sharding, self.abstract())
        return jax.jit(
            lambda s: map_weights(lambda w: self._unstaged(w), s, lambda x: x),
            out_shardings=where,
            compiler_options=quick_compile(),
        )

    def _staged(self, state: TrainState) -> TrainState:
        ex = self.executor
        return map_weights(lambda w: stage_tree(w, ex.pipe, ex.encoders), state, lambda x: x)

    def _unstaged(self, weights: Params) -> Params:
        return unstage_tree(weights, self.executor.pipe, self.executor.encoders)

    def train_step(self, compiler_options: dict[str, Any] | None = None) -> Any:
        """jit of (state, batch, *tables) -> (state, metrics); the old state is given up.

        Metrics: loss, gradient norm before clipping, and the NaN count of each device.
        """
        specs = self.executor.param_specs
        shapes = jax.eval_shape(self._initial, jax.random.key(0))
        state_specs = map_weights(lambda _: specs, shapes, lambda _: Spec())
        metric_specs = {
            "loss": Spec(),
            "grad_norm": Spec(),
            "nans": Spec(self.executor.meshes.grid.axes),
        }
        mapped = jax.shard_map(
            self._update,
            mesh=self.executor.meshes.mesh,
            in_specs=(state_specs, self.executor.feed.batch_specs, *self.executor.feed.table_specs),
            out_specs=(state_specs, metric_specs),
            check_vma=False,
        )
        mesh = self.executor.meshes.mesh
        metrics = {name: NamedSharding(mesh, spec) for name, spec in metric_specs.items()}
        return jax.jit(
            mapped,
            out_shardings=(self.shardings(), metrics),
            donate_argnums=0,
            compiler_options=compiler_options,
        )

    def _update(
        self, state: TrainState, batch: Any, *tables: jax.Array
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        loss, grads, nans = self.executor.loss_and_gradients(state.params, batch, *tables)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        norm = global_norm(grads, self.executor.param_specs)
        updates, optimizer = self.tx.update(
            clip(grads, norm, self.config.clip), state.optimizer, state.params
        )
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": loss, "grad_norm": norm, "nans": nans}
        return TrainState(params, optimizer, state.step + 1), metrics
