"""The decoder-only LLM's two ends: embedding with features spliced in, and head with loss."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from optimus_jax.config import ModelConfig
from optimus_jax.models.blocks import BLOCKS
from optimus_jax.models.layers import norm
from optimus_jax.models.region import SEQUENTIAL, Region
from optimus_jax.models.weights import Params, weight


class Embedding(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, config: ModelConfig):
        width = config.llm.width
        self.token = weight(rngs, (config.vocabulary, width), ("vocabulary", "width"), 0.5)
        if BLOCKS[config.llm.block].positions:
            self.position = weight(rngs, (config.sequence, width), (None, "width"), 0.5)


class Head(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, config: ModelConfig):
        width = config.llm.width
        self.norm = BLOCKS[config.llm.block].norm(width)
        shape = width, config.vocabulary
        self.kernel = weight(rngs, shape, ("width", "vocabulary"), width**-0.5)


def embed(
    p: Params,
    tokens_BT: jax.Array,
    features_BPD: jax.Array,
    image_token: int,
    region: Region = SEQUENTIAL,
) -> jax.Array:
    """Token and position vectors [B, T, D], the k-th image token of a row replaced by feature k.

    A rank looks up the rows of the vocabulary that it holds. Linear in weights and features: the
    executor's backward relies on it, since it keeps neither.
    """
    is_image_BT = tokens_BT == image_token
    row_BT, mine_BT = _own_rows(tokens_BT, p["token"].shape[0], region)
    text_BT = mine_BT & ~is_image_BT
    x_BTD = region.leave(jnp.where(text_BT[..., None], p["token"][row_BT], 0))
    place_BT = jnp.clip(jnp.cumsum(is_image_BT, axis=1) - 1, 0, features_BPD.shape[1] - 1)
    spliced_BTD = jnp.take_along_axis(features_BPD, place_BT[..., None], axis=1)
    whole_BTD = jnp.where(is_image_BT[..., None], spliced_BTD.astype(x_BTD.dtype), 0)
    if "position" in p:
        whole_BTD = whole_BTD + p["position"]
    return x_BTD + region.shard(whole_BTD)


def logits(p: Params, x_BTD: jax.Array, region: Region = SEQUENTIAL) -> jax.Array:
    """float32 scores of the next token [B, T, V], of a rank's own part of the vocabulary."""
    return (region.enter(norm(p["norm"], x_BTD)) @ p["kernel"]).astype(jnp.float32)


def summed_loss(
    p: Params,
    x_BTD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
    region: Region = SEQUENTIAL,
) -> jax.Array:
    """Cross-entropy of the targets, summed with weights; divide by the sum of the weights. The
    scores stay where they are, only numbers for each position cross between ranks (Shoeybi et al.
    2019, section 3)."""
    scores_BTV = logits(p, x_BTD, region)
    most_BT = region.max(jax.lax.stop_gradient(scores_BTV.max(-1)))
    total_BT = region.sum(jnp.exp(scores_BTV - most_BT[..., None]).sum(-1))
    row_BT, mine_BT = _own_rows(targets_BT, scores_BTV.shape[-1], region)
    chosen_BT = jnp.take_along_axis(scores_BTV, row_BT[..., None], axis=-1)[..., 0]
    chosen_BT = region.sum(jnp.where(mine_BT, chosen_BT, 0))
    return jnp.sum(weights_BT * (most_BT + jnp.log(total_BT) - chosen_BT))


def _own_rows(ids_BT: jax.Array, rows: int, region: Region) -> tuple[jax.Array, jax.Array]:
    """Where ids of the vocabulary stand in a rank's `rows` of it, and which of them do."""
    local_BT = ids_BT - region.rank() * rows
    mine_BT = (local_BT >= 0) & (local_BT < rows)
    return jnp.where(mine_BT, local_BT, 0), mine_BT
