"""The decoder-only LLM's two ends: embedding with image features spliced in, and head with loss."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from optimus_jax.config import ModelConfig
from optimus_jax.models.layers import LayerNorm, layer_norm
from optimus_jax.models.weights import Params, weight


class Embedding(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, config: ModelConfig):
        width = config.llm.width
        self.token = weight(rngs, (config.vocabulary, width), ("vocabulary", "width"), 0.5)
        self.position = weight(rngs, (config.sequence, width), (None, "width"), 0.5)


class Head(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, config: ModelConfig):
        self.norm = LayerNorm(config.llm.width)
        width = config.llm.width
        shape = width, config.vocabulary
        self.kernel = weight(rngs, shape, ("width", "vocabulary"), width**-0.5)


def embed(p: Params, tokens_BT: jax.Array, features_BPD: jax.Array, image_token: int) -> jax.Array:
    """Token and position vectors [B, T, D], the k-th image token of a row replaced by feature k.

    Linear in weights and features: the executor's backward relies on it, since it keeps neither.
    """
    x_BTD = p["token"][tokens_BT]
    is_image_BT = tokens_BT == image_token
    place_BT = jnp.clip(jnp.cumsum(is_image_BT, axis=1) - 1, 0, features_BPD.shape[1] - 1)
    spliced_BTD = jnp.take_along_axis(features_BPD, place_BT[..., None], axis=1)
    x_BTD = jnp.where(is_image_BT[..., None], spliced_BTD.astype(x_BTD.dtype), x_BTD)
    return x_BTD + p["position"]


def logits(p: Params, x_BTD: jax.Array) -> jax.Array:
    """float32 scores of the next token [B, T, V]."""
    return (layer_norm(p["norm"], x_BTD) @ p["kernel"]).astype(jnp.float32)


def summed_loss(
    p: Params, x_BTD: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array
) -> jax.Array:
    """Cross-entropy of the targets, summed with weights; divide by the sum of the weights."""
    scores_BTV = logits(p, x_BTD)
    chosen_BT = jnp.take_along_axis(scores_BTV, targets_BT[..., None], axis=-1)[..., 0]
    return jnp.sum(weights_BT * (jax.nn.logsumexp(scores_BTV, axis=-1) - chosen_BT))
