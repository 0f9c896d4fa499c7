"""From an encoder to the LLM: the encoder's last norm and an MLP into the LLM's width."""

from __future__ import annotations

import jax
from flax import nnx

from optimus_jax.config import ModelConfig
from optimus_jax.models.layers import LayerNorm, Mlp, layer_norm, mlp
from optimus_jax.models.region import SEQUENTIAL, Region
from optimus_jax.models.weights import Params


class Projector(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, config: ModelConfig, name: str):
        width = config.encoders[name].width
        self.norm = LayerNorm(width)
        self.mlp = Mlp(rngs, width, config.projector_hidden, config.llm.width, 1.0)


def project(p: Params, x_BPD: jax.Array, region: Region = SEQUENTIAL) -> jax.Array:
    """Encoder outputs [B, P, encoder width] to features [B, P, LLM width], whole on every rank."""
    return mlp(p["mlp"], layer_norm(p["norm"], x_BPD), region)
