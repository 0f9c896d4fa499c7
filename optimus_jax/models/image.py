"""The input of an image encoder: non-overlapping patches, and where they lie in the picture."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from optimus_jax.config import ModelConfig
from optimus_jax.models.region import SEQUENTIAL, Region
from optimus_jax.models.weights import Params, constant, weight


class PatchEmbedding(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, config: ModelConfig, name: str):
        encoder, count = config.encoders[name], config.features_of(name)
        width, inputs = encoder.width, encoder.patch**2 * config.image_channels
        self.kernel = weight(rngs, (inputs, width), (None, "width"), inputs**-0.5)
        self.bias = constant((width,), ("width",), 0.0)
        self.position = weight(rngs, (count, width), (None, "width"), 0.5)


def embed_patches(
    p: Params, image_BHWC: jax.Array, patch: int, region: Region = SEQUENTIAL
) -> jax.Array:
    """uint8 pictures [B, H, W, C] to patch vectors [B, P, D], rows of patches first."""
    rows, height, width, channels = image_BHWC.shape
    x = image_BHWC.reshape(rows, height // patch, patch, width // patch, patch, channels)
    x = x.transpose(0, 1, 3, 2, 4, 5).reshape(rows, -1, patch * patch * channels)
    x = (x.astype(jnp.float32) / 127.5 - 1).astype(p["kernel"].dtype)
    return region.shard(x @ p["kernel"] + p["bias"] + p["position"])
