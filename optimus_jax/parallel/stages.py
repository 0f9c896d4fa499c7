"""Layer stacks [layers, ...] cut into stages and back.

Weights on disk and in the sequential model know no stages. On the devices they are staged: the
LLM's as [chunks, stages, layers of a stage, ...], where virtual stage v = chunk * stages + stage
holds the next `llm_layers[v]` layers; an encoder's as [stages, layers of a stage, ...]. Stages are
padded with zeros to the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optimus_jax.parallel.sharding import is_axes
from optimus_jax.schedule.task import Pipeline

Tree = Any


def stage_tree(tree: Tree, pipe: Pipeline, encoders: Sequence[str]) -> Tree:
    """The tree with all layers staged; `encoders` are the names of the pipeline's encoders. Works
    on any tree that has weights' structure."""

    def stage(index: np.ndarray) -> Callable[[jax.Array], jax.Array]:
        valid = jnp.asarray(index >= 0)

        def one(x_L: jax.Array) -> jax.Array:
            x = x_L[np.maximum(index, 0)]
            return jnp.where(valid.reshape(valid.shape + (1,) * (x_L.ndim - 1)), x, 0)

        return one

    return _on_layers(tree, lambda layers, i: jax.tree.map(stage(i), layers), pipe, encoders)


def unstage_tree(tree: Tree, pipe: Pipeline, encoders: Sequence[str]) -> Tree:
    """The inverse of `stage_tree`; padding is dropped."""

    def unstage(index: np.ndarray) -> Callable[[jax.Array], jax.Array]:
        order = np.argsort(index[index >= 0])
        places = np.flatnonzero(index.reshape(-1) >= 0)[order]

        def one(x: jax.Array) -> jax.Array:
            return x.reshape(-1, *x.shape[index.ndim :])[places]

        return one

    return _on_layers(tree, lambda layers, i: jax.tree.map(unstage(i), layers), pipe, encoders)


def stage_axes(axes: Tree, pipe: Pipeline, encoders: Sequence[str]) -> Tree:
    """The axis names of a staged tree from those of the stage-free one."""

    def change(layers: Tree, index: np.ndarray) -> Tree:
        first = (None, "stages") if index.ndim == 3 else ("stages",)
        return jax.tree.map(lambda names: (*first, *names), layers, is_leaf=is_axes)

    return _on_layers(axes, change, pipe, encoders)


def _layer_index(counts: Sequence[int]) -> np.ndarray:
    """[stages, longest]: the layer at each place, -1 for padding."""
    index = np.full((len(counts), max(counts)), -1)
    first = 0
    for v, count in enumerate(counts):
        index[v, :count] = range(first, first + count)
        first += count
    return index


def _on_layers(
    tree: Tree, change: Callable[[Tree, np.ndarray], Tree], pipe: Pipeline, encoders: Sequence[str]
) -> Tree:
    """The tree with `change(layers, index)` in place of each module's layers."""
    index = _layer_index(pipe.llm_layers).reshape(pipe.chunks, pipe.stages, -1)
    llm = {**tree["llm"], "layers": change(tree["llm"]["layers"], index)}
    changed = {}
    for name, encoder in zip(encoders, pipe.encoders, strict=True):
        part = tree["encoders"][name]
        changed[name] = {**part, "layers": change(part["layers"], _layer_index(encoder.layers))}
    return {**tree, "llm": llm, "encoders": changed}
