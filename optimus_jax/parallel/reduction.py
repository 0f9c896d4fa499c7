"""Gradient sums over replicas and stages, in few collectives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optimus_jax.parallel.mesh import ENCODER_DATA, PIPE

Tree = Any
Axes = tuple[str, ...]

# Axes of the grid over which each part's gradients are summed: its replicas, and for the ends of a
# module the stages too, since every stage holds a copy and only some use it.
_LLM, _ENCODER = ("dp",), ENCODER_DATA
SUMMED_OVER: dict[tuple[str, ...], Axes] = {
    ("llm", "layers"): _LLM,
    ("llm", "embed"): (*_LLM, *PIPE),
    ("llm", "head"): (*_LLM, *PIPE),
    ("encoder", "layers"): _ENCODER,
    ("encoder", "embed"): (*_ENCODER, "pi"),
    ("projector",): (*_ENCODER, "pi"),
}

# Arrays below this many bytes travel together: between processes on CPUs a sum costs about 2 ms
# however small it is, and a model has dozens. Larger ones go alone: nothing large is copied.
TOGETHER = 1 << 20


def reduce_gradients(grads: Tree) -> Tree:
    """Each device's gradients summed as SUMMED_OVER says; runs inside shard_map."""
    paths = jax.tree_util.tree_leaves_with_path(grads)
    leaves, tree = jax.tree.flatten(grads)
    together: dict[Axes, list[int]] = {}
    for k, (path, leaf) in enumerate(paths):
        names = tuple(key.key for key in path)
        axes = next(axes for part, axes in SUMMED_OVER.items() if names[: len(part)] == part)
        axes = tuple(axis for axis in axes if lax.axis_size(axis) > 1)
        if not axes:
            continue
        if leaf.nbytes < TOGETHER:
            together.setdefault(axes, []).append(k)
        else:
            leaves[k] = lax.psum(leaf, axes)
    for axes, members in together.items():
        total = lax.psum(jnp.concatenate([leaves[k].ravel() for k in members]), axes)
        start = 0
        for k in members:
            end = start + leaves[k].size
            leaves[k], start = total[start:end].reshape(leaves[k].shape), end
    return jax.tree.unflatten(tree, leaves)
