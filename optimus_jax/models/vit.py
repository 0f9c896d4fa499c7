"""The vision encoder: a pre-norm ViT over non-overlapping patches, and the projector after it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from optimus_jax.config import ModelConfig
from optimus_jax.models.layers import LayerNorm, Mlp, layer_norm, mlp
from optimus_jax.models.weights import Params, constant, weight


class PatchEmbedding(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, config: ModelConfig):
        width, inputs = config.encoder.width, config.encoder.patch**2 * config.image_channels
        self.kernel = weight(rngs, (inputs, width), (None, "width"), inputs**-0.5)
        self.bias = constant((width,), ("width",), 0.0)
        self.position = weight(rngs, (config.image_tokens, width), (None, "width"), 0.5)


class Projector(nnx.Module):
    """The encoder's last norm and the MLP into the LLM's width."""

    def __init__(self, rngs: nnx.Rngs, config: ModelConfig):
        self.norm = LayerNorm(config.encoder.width)
        hidden, out = config.projector_hidden, config.llm.width
        self.mlp = Mlp(rngs, config.encoder.width, hidden, out, 1.0)


def embed_patches(p: Params, image_BHWC: jax.Array, patch: int) -> jax.Array:
    """uint8 pictures [B, H, W, C] to patch vectors [B, P, D], rows of patches first."""
    rows, height, width, channels = image_BHWC.shape
    x = image_BHWC.reshape(rows, height // patch, patch, width // patch, patch, channels)
    x = x.transpose(0, 1, 3, 2, 4, 5).reshape(rows, -1, patch * patch * channels)
    x = (x.astype(jnp.float32) / 127.5 - 1).astype(p["kernel"].dtype)
    return x @ p["kernel"] + p["bias"] + p["position"]


def project(p: Params, x_BPD: jax.Array) -> jax.Array:
    """Encoder outputs [B, P, encoder width] to features [B, P, LLM width]."""
    return mlp(p["mlp"], layer_norm(p["norm"], x_BPD))
