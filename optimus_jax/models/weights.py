"""How weights are declared: shape, logical axes and initialiser in one place, by flax nnx."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

Params = dict[str, Any]  # nested dict of arrays
Axes = tuple[str | None, ...]


def weight(rngs: nnx.Rngs, shape: tuple[int, ...], axes: Axes, scale: float) -> nnx.Param:
    """A float32 weight, normally distributed with standard deviation `scale`. `axes` names its
    dimensions for the sharding rules in parallel/sharding.py."""
    value = scale * jax.random.normal(rngs.params(), shape, jnp.float32)
    return nnx.Param(value, axes=axes)


def constant(shape: tuple[int, ...], axes: Axes, value: float) -> nnx.Param:
    """A float32 weight that starts as `value` everywhere."""
    return nnx.Param(jnp.full(shape, value, jnp.float32), axes=axes)


Declare = Callable[[nnx.Rngs], nnx.Module]


def initialise(declare: Declare, key: jax.Array, layers: int | None = None) -> Params:
    """The values of a declared module; with `layers`, stacked along a first axis of that length."""

    def values(key: jax.Array) -> Params:
        return nnx.to_pure_dict(nnx.state(declare(nnx.Rngs(key)), nnx.Param))

    return values(key) if layers is None else jax.vmap(values)(jax.random.split(key, layers))


def logical_axes(declare: Declare, stacked: bool = False) -> Params:
    """The tree of axis names that `initialise` gives values for; 'layers' leads when stacked."""
    state = nnx.state(nnx.eval_shape(lambda: declare(nnx.Rngs(0))), nnx.Param)
    first = ("layers",) if stacked else ()
    axes = {path: first + value.get_metadata("axes") for path, value in nnx.to_flat_state(state)}
    tree: Params = {}
    for path, names in axes.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = names
    return tree
