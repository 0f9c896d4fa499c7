"""Layer stacks [layers, ...] cut into stages [chunks, stages, layers of a stage, ...] and back.

Weights on disk and in the sequential model know no stages. On the devices the LLM's layers are
staged: virtual stage v = chunk * stages + stage holds the next `llm_layers[v]` layers, padded with
zeros to the longest.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optimus_jax.parallel.sharding import is_axes
from optimus_jax.schedule.task import Pipeline

Tree = Any
LAYERS = ("llm", "layers")  # the stack that is staged


def stage_tree(tree: Tree, pipe: Pipeline) -> Tree:
    """The tree with the LLM's layers staged. Works on any tree that has weights' structure."""
    index = _layer_index(pipe)
    valid = jnp.asarray(index >= 0)

    def stage(x_L: jax.Array) -> jax.Array:
        x_CPL = x_L[np.maximum(index, 0)]
        return jnp.where(valid.reshape(valid.shape + (1,) * (x_L.ndim - 1)), x_CPL, 0)

    return _replace_layers(tree, lambda layers: jax.tree.map(stage, layers))


def unstage_tree(tree: Tree, pipe: Pipeline) -> Tree:
    """The inverse of `stage_tree`; padding is dropped."""
    index = _layer_index(pipe)
    order = np.argsort(index[index >= 0])
    places = np.flatnonzero(index.reshape(-1) >= 0)[order]

    def unstage(x_CPL: jax.Array) -> jax.Array:
        return x_CPL.reshape(-1, *x_CPL.shape[3:])[places]

    return _replace_layers(tree, lambda layers: jax.tree.map(unstage, layers))


def stage_axes(axes: Tree) -> Tree:
    """The axis names of a staged tree from those of the stage-free one."""

    def stage(names: tuple[str | None, ...]) -> tuple[str | None, ...]:
        return (None, "stages", *names)

    return _replace_layers(axes, lambda layers: jax.tree.map(stage, layers, is_leaf=is_axes))


def _layer_index(pipe: Pipeline) -> np.ndarray:
    """[chunks, stages, longest]: the layer at each place, -1 for padding."""
    longest = max(pipe.llm_layers)
    index = np.full((pipe.virtual_stages, longest), -1)
    first = 0
    for v, count in enumerate(pipe.llm_layers):
        index[v, :count] = range(first, first + count)
        first += count
    return index.reshape(pipe.chunks, pipe.stages, longest)


def _replace_layers(tree: Tree, change: Any) -> Tree:
    module, stack = LAYERS
    return {**tree, module: {**tree[module], stack: change(tree[module][stack])}}
