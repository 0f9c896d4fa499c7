"""ViT-22B's block (Dehghani et al. 2023, section 2.1): attention and MLP side by side from one
norm, queries and keys normed along the head, no biases in norms and the product to queries, keys
and values. Norms do not subtract the mean."""

from __future__ import annotations

import jax
from flax import nnx

from optimus_jax.models.layers import (
    Piece,
    RmsNorm,
    Sizes,
    State,
    attend,
    dense,
    join_heads,
    rms_norm,
)
from optimus_jax.models.region import Region
from optimus_jax.models.weights import Params, constant, weight


class QkNorm(nnx.Module):
    """Scales that all heads share."""

    def __init__(self, head: int):
        self.query_scale = constant((head,), (None,), 1.0)
        self.key_scale = constant((head,), (None,), 1.0)


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, s: Sizes):
        width, heads, head, scale = s.width, s.heads, s.head, s.width**-0.5
        self.qkv = weight(rngs, (width, 3, heads, head), ("width", None, "heads", None), scale)
        self.qk_norm = QkNorm(head)
        self.out = weight(rngs, (heads, head, width), ("heads", None, "width"), s.gain * scale)


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, s: Sizes):
        self.up = weight(rngs, (s.width, s.hidden), ("width", "hidden"), s.width**-0.5)
        self.up_bias = constant((s.hidden,), ("hidden",), 0.0)
        scale = s.gain * s.hidden**-0.5
        self.down = weight(rngs, (s.hidden, s.width), ("hidden", "width"), scale)


class Block(nnx.Module):
    """`bias` is that of both last products, which are added up."""

    def __init__(self, rngs: nnx.Rngs, s: Sizes):
        self.norm = RmsNorm(s.width)
        self.attention = Attention(rngs, s)
        self.mlp = Mlp(rngs, s)
        self.bias = constant((s.width,), ("width",), 0.0)


def pieces(causal: bool) -> tuple[Piece, ...]:
    def mix(p: Params, state: State, region: Region) -> State:
        x_BTD, normed_BTD, (q_BNTH, k_BNTH, v_BNTH) = state
        norm = p["attention"]["qk_norm"]
        q_BNTH = rms_norm(norm["query_scale"], q_BNTH)
        k_BNTH = rms_norm(norm["key_scale"], k_BNTH)
        return x_BTD, normed_BTD, attend(q_BNTH, k_BNTH, v_BNTH, causal, region)

    return _qkv, mix, _up, _down


def _qkv(p: Params, state: State, region: Region) -> State:
    (x_BTD,) = state
    normed_BTD = region.enter(rms_norm(p["norm"]["scale"], x_BTD))
    qkv_BTCNH = dense(normed_BTD, p["attention"]["qkv"])
    return x_BTD, normed_BTD, region.keep("qkv_proj", qkv_BTCNH.transpose(2, 0, 3, 1, 4))


def _up(p: Params, state: State, region: Region) -> State:
    x_BTD, normed_BTD, mixed_BTD = state
    up_BTF = region.keep("mlp_up", dense(normed_BTD, p["mlp"]["up"]) + p["mlp"]["up_bias"])
    return x_BTD, mixed_BTD, jax.nn.gelu(up_BTF)


def _down(p: Params, state: State, region: Region) -> State:
    x_BTD, mixed_BTD, hidden_BTF = state
    both_BTD = join_heads(mixed_BTD, p["attention"]["out"]) + dense(hidden_BTF, p["mlp"]["down"])
    return (x_BTD + region.leave(both_BTD) + p["bias"],)
