"""AdamW with warm-up and cosine decay, and the global gradient norm inside shard_map."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optimus_jax.config import TrainConfig
from optimus_jax.models.weights import Params
from optimus_jax.parallel.mesh import PIPE


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """Linear from 0 to the peak over the warm-up steps, then cosine to 0 at the last step."""
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
        return not name.endswith("bias") and name not in ("scale", "position")

    return jax.tree_util.tree_map_with_path(one, params)


def global_norm(grads: Params) -> jax.Array:
    """The norm of all gradients, each weight counted once: the LLM's layers are cut over the
    stages and their squares summed over them, everything else is whole on each device.

    `grads` are one device's reduced shards; runs inside shard_map.
    """

    def squares(tree: Params) -> jax.Array:
        return sum((jnp.sum(jnp.square(g)) for g in jax.tree.leaves(tree)), jnp.zeros(()))

    cut = grads["llm"]["layers"]
    whole = {**grads, "llm": {k: v for k, v in grads["llm"].items() if k != "layers"}}
    return jnp.sqrt(lax.psum(squares(cut), PIPE) + squares(whole))


def clip(grads: Params, norm: jax.Array, limit: float) -> Params:
    """Gradients scaled down to the norm `limit` if theirs is larger."""
    scale = jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-12))
    return jax.tree.map(lambda g: g * scale, grads)
