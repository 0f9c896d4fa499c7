"""AdamW with warm-up and cosine decay, and the global gradient norm inside shard_map."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optimus_jax.config import TrainConfig
from optimus_jax.models.weights import Params
from optimus_jax.parallel.sharding import cut_axes


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """Linear from 0 to the peak over the warm-up steps, then cosine to 0 after the last step."""
    return optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, config.warmup, config.steps
    )


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW without clipping: optax's clip would take the norm of one device's shards."""
    return optax.adamw(
        learning_rate(config), b1=0.9, b2=0.95, weight_decay=config.weight_decay, mask=_decays
    )


def _decays(params: Params) -> Params:
    """Weight decay pulls matrices only, not biases, norm scales and positions."""

    def one(path: tuple[Any, ...], _: Any) -> bool:
        name = path[-1].key
        return not name.endswith(("bias", "scale", "position"))

    return jax.tree_util.tree_map_with_path(one, params)


def global_norm(grads: Params, specs: Params) -> jax.Array:
    """The norm of all gradients, each weight counted once: squares of shards are summed over the
    axes of the grid that `specs` cut the weight over; along others every device has the same.

    `grads` are one device's reduced shards; runs inside shard_map.
    """
    by_axes: dict[tuple[str, ...], jax.Array] = {}
    for grad, spec in zip(jax.tree.leaves(grads), jax.tree.leaves(specs), strict=True):
        axes = cut_axes(spec)
        by_axes[axes] = by_axes.get(axes, jnp.zeros(())) + jnp.sum(jnp.square(grad))
    totals = [lax.psum(x, axes) if axes else x for axes, x in by_axes.items()]
    return jnp.sqrt(sum(totals, jnp.zeros(())))


def clip(grads: Params, norm: jax.Array, limit: float) -> Params:
    """Gradients scaled down to the norm `limit` if theirs is larger."""
    scale = jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-12))
    return jax.tree.map(lambda g: g * scale, grads)
