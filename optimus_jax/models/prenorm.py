"""The pre-norm block of GPT-2 and ViT: LayerNorm, attention, LayerNorm, MLP, all with biases."""

from __future__ import annotations

import jax
from flax import nnx

from optimus_jax.models.layers import (
    LayerNorm,
    Mlp,
    Piece,
    Sizes,
    State,
    attend,
    dense,
    join_heads,
    layer_norm,
)
from optimus_jax.models.region import Region
from optimus_jax.models.weights import Params, constant, weight


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, s: Sizes):
        width, heads, head, scale = s.width, s.heads, s.head, s.width**-0.5
        self.qkv = weight(rngs, (width, 3, heads, head), ("width", None, "heads", None), scale)
        self.qkv_bias = constant((3, heads, head), (None, "heads", None), 0.0)
        self.out = weight(rngs, (heads, head, width), ("heads", None, "width"), s.gain * scale)
        self.out_bias = constant((width,), ("width",), 0.0)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, s: Sizes):
        self.attention_norm = LayerNorm(s.width)
        self.attention = Attention(rngs, s)
        self.mlp_norm = LayerNorm(s.width)
        self.mlp = Mlp(rngs, s.width, s.hidden, s.width, s.gain)


def pieces(causal: bool) -> tuple[Piece, ...]:
    def mix(p: Params, state: State, region: Region) -> State:
        x_BTD, qkv_CBNTH = state
        q_BNTH, k_BNTH, v_BNTH = qkv_CBNTH
        return x_BTD, attend(q_BNTH, k_BNTH, v_BNTH, causal, region)

    return _qkv, mix, _out, _up, _down


def _qkv(p: Params, state: State, region: Region) -> State:
    (x_BTD,) = state
    normed_BTD = region.enter(layer_norm(p["attention_norm"], x_BTD))
    qkv_BTCNH = dense(normed_BTD, p["attention"]["qkv"]) + p["attention"]["qkv_bias"]
    # heads before positions: XLA's products on a CPU want each head's rows together
    return x_BTD, region.keep("qkv_proj", qkv_BTCNH.transpose(2, 0, 3, 1, 4))


def _out(p: Params, state: State, region: Region) -> State:
    x_BTD, mixed_BTD = state
    out_BTD = region.leave(join_heads(mixed_BTD, p["attention"]["out"]))
    return (x_BTD + region.keep("out_proj", out_BTD + p["attention"]["out_bias"]),)


def _up(p: Params, state: State, region: Region) -> State:
    (x_BTD,) = state
    normed_BTD = region.enter(layer_norm(p["mlp_norm"], x_BTD))
    up_BTF = region.keep("mlp_up", dense(normed_BTD, p["mlp"]["up"]) + p["mlp"]["up_bias"])
    return x_BTD, jax.nn.gelu(up_BTF)


def _down(p: Params, state: State, region: Region) -> State:
    x_BTD, hidden_BTF = state
    down_BTD = region.leave(dense(hidden_BTF, p["mlp"]["down"])) + p["mlp"]["down_bias"]
    return (x_BTD + down_BTD,)
