"""The kinds of transformer layers by name. Any of them makes an encoder, which is never causal, or
an LLM, which always is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
from flax import nnx

from optimus_jax.config import EncoderConfig, LlmConfig
from optimus_jax.models import llama, prenorm, vit22b
from optimus_jax.models.layers import LayerNorm, Piece, RmsNorm, Sizes
from optimus_jax.models.region import SEQUENTIAL, Region
from optimus_jax.models.weights import Declare, Params


@dataclasses.dataclass(frozen=True)
class Kind:
    """`pieces(causal)`, run in a row from the state (x,) to (y,), are the layer. An LLM of such
    layers has learned positions in its embedding if `positions`, and `norm` before its head."""

    declare: Callable[[nnx.Rngs, Sizes], nnx.Module]
    pieces: Callable[[bool], tuple[Piece, ...]]
    norm: Callable[[int], nnx.Module] = LayerNorm
    positions: bool = True


PRE_NORM = Kind(prenorm.Block, prenorm.pieces)

BLOCKS: dict[str, Kind] = {
    "vit": PRE_NORM,
    "gpt": PRE_NORM,
    "vit22b": Kind(vit22b.Block, vit22b.pieces),
    "llama": Kind(llama.Block, llama.pieces, norm=RmsNorm, positions=False),
}


def declare(part: EncoderConfig | LlmConfig) -> Declare:
    """One layer of an encoder or of the LLM."""
    kv_heads = part.kv_heads if isinstance(part, LlmConfig) else 0
    sizes = Sizes(part.width, part.heads, kv_heads or part.heads, part.hidden, part.layers)
    return lambda rngs: BLOCKS[part.block].declare(rngs, sizes)


def pieces(part: EncoderConfig | LlmConfig) -> tuple[Piece, ...]:
    """The layer's steps: each takes the weights, a tuple of arrays and a region, and gives the
    next tuple; the first begins with (x,), the last ends with (y,)."""
    return BLOCKS[part.block].pieces(isinstance(part, LlmConfig))


def run(
    steps: tuple[Piece, ...], p: Params, x: jax.Array, region: Region = SEQUENTIAL
) -> jax.Array:
    """The pieces in a row: the whole layer."""
    state: tuple[jax.Array, ...] = (x,)
    for step in steps:
        state = step(p, state, region)
    (y,) = state
    return y
