"""Weights gathered from their replicas' shards, gradients summed into them, in few collectives."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optimus_jax.parallel.layout import Layout, is_layout
from optimus_jax.parallel.mesh import Axes

Tree = Any

# Arrays below this many bytes travel together: between processes on CPUs a sum costs about 2 ms
# however small it is, and a model has dozens. Larger ones go alone: nothing large is copied.
TOGETHER = 1 << 20


def gather(masters: Tree, layouts: Tree, dtype: Any, scope: str = "gather") -> Tree:
    """The weights in the compute dtype, whole along their replicas; runs inside shard_map. `scope`
    is the collectives' name in the compiled step.

    They are cast first: half as much then travels.
    """

    def one(layout: Layout, x: jax.Array) -> jax.Array:
        x = x.astype(dtype)
        if layout.zero is None:
            return x
        parts, axis = _outermost(x, layout.zero)
        with jax.named_scope(scope):
            whole = lax.all_gather(parts, layout.replicas, axis=axis, tiled=True)
        return whole.reshape(*x.shape[: layout.zero], -1, *x.shape[layout.zero + 1 :])

    return jax.tree.map(one, layouts, masters, is_leaf=is_layout)


def reduce_gradients(grads: Tree, layouts: Tree, scope: str = "reduce") -> Tree:
    """Each device's gradients summed over replicas and, where they are parts, over tensor shards;
    of weights that are cut over replicas each keeps its own part. Runs inside shard_map; `scope`
    is the name under which the latter stand in the compiled step."""
    leaves, tree = jax.tree.flatten(grads)
    together: dict[tuple[Axes, Any], list[int]] = {}
    for k, layout in enumerate(jax.tree.leaves(layouts, is_leaf=is_layout)):
        leaf, axes = leaves[k], layout.replicas + layout.partial
        if layout.zero is not None:
            whole, axis = _outermost(leaf, layout.zero)
            with jax.named_scope(scope):
                part = lax.psum_scatter(whole, layout.replicas, scatter_dimension=axis, tiled=True)
            part = part.reshape(*leaf.shape[: layout.zero], -1, *leaf.shape[layout.zero + 1 :])
            leaves[k] = lax.psum(part, layout.partial) if layout.partial else part
        elif axes and leaf.nbytes < TOGETHER:
            together.setdefault((axes, leaf.dtype), []).append(k)
        elif axes:
            leaves[k] = lax.psum(leaf, axes)
    for (axes, _), members in together.items():
        total = lax.psum(jnp.concatenate([leaves[k].ravel() for k in members]), axes)
        start = 0
        for k in members:
            end = start + leaves[k].size
            leaves[k], start = total[start:end].reshape(leaves[k].shape), end
    return jax.tree.unflatten(tree, leaves)


def _outermost(x: jax.Array, axis: int) -> tuple[jax.Array, int]:
    """x without the dimensions of size 1 before `axis`, and where that is then. XLA gathers and
    scatters the outermost dimension; of any other it copies the array before and after."""
    if math.prod(x.shape[:axis]) > 1:
        return x, axis
    return x.reshape(x.shape[axis:]), 0
