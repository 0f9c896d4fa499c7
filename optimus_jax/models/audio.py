"""The input of an audio encoder: stretches of a spectrogram, and when they sound."""

from __future__ import annotations

import jax
from flax import nnx

from optimus_jax.config import ModelConfig
from optimus_jax.models.region import SEQUENTIAL, Region
from optimus_jax.models.weights import Params, constant, weight


class FrameEmbedding(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, config: ModelConfig, name: str):
        encoder, count = config.encoders[name], config.features_of(name)
        width, inputs = encoder.width, encoder.patch * config.audio_bands
        self.kernel = weight(rngs, (inputs, width), (None, "width"), inputs**-0.5)
        self.bias = constant((width,), ("width",), 0.0)
        self.position = weight(rngs, (count, width), (None, "width"), 0.5)


def embed_frames(
    p: Params, audio_BTF: jax.Array, patch: int, region: Region = SEQUENTIAL
) -> jax.Array:
    """float32 spectrograms [B, frames, bands] to vectors [B, P, D], one for every `patch` frames
    with all their bands."""
    rows, frames, bands = audio_BTF.shape
    x = audio_BTF.reshape(rows, frames // patch, patch * bands).astype(p["kernel"].dtype)
    return region.shard(x @ p["kernel"] + p["bias"] + p["position"])
