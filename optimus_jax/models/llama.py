"""LLaMA's block (Touvron et al. 2023): RMSNorm, rotary positions, grouped-query attention, SwiGLU,
no biases."""

from __future__ import annotations

import jax
import jax.numpy as jnp
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
from optimus_jax.models.weights import Params, weight

BASE = 10000.0  # of the rotary positions' wavelengths


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, s: Sizes):
        width, head, scale = s.width, s.head, s.width**-0.5
        self.q = weight(rngs, (width, s.heads, head), ("width", "heads", None), scale)
        shape = width, 2, s.kv_heads, head
        self.kv = weight(rngs, shape, ("width", None, "heads", None), scale)
        self.out = weight(rngs, (s.heads, head, width), ("heads", None, "width"), s.gain * scale)


class Mlp(nnx.Module):
    """`up` has the gate's kernel, then that of what it lets through."""

    def __init__(self, rngs: nnx.Rngs, s: Sizes):
        self.up = weight(rngs, (s.width, 2, s.hidden), ("width", None, "hidden"), s.width**-0.5)
        scale = s.gain * s.hidden**-0.5
        self.down = weight(rngs, (s.hidden, s.width), ("hidden", "width"), scale)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, s: Sizes):
        self.attention_norm = RmsNorm(s.width)
        self.attention = Attention(rngs, s)
        self.mlp_norm = RmsNorm(s.width)
        self.mlp = Mlp(rngs, s)


def pieces(causal: bool) -> tuple[Piece, ...]:
    def mix(p: Params, state: State, region: Region) -> State:
        x_BTD, q_BNTH, k_BKTH, v_BKTH = state
        return x_BTD, attend(q_BNTH, k_BKTH, v_BKTH, causal, region)

    return _qkv, mix, _out, _up, _down


def rotate(x_BNTH: jax.Array) -> jax.Array:
    """Rotary positions (Su et al. 2021): the pair of numbers k and k + H/2 of a head turns by the
    position times BASE^(-2k/H)."""
    length, head = x_BNTH.shape[2:]
    wave_H = BASE ** (-2 * jnp.arange(head // 2, dtype=jnp.float32) / head)
    angle_TH = jnp.arange(length, dtype=jnp.float32)[:, None] * wave_H
    cos_TH, sin_TH = jnp.cos(angle_TH), jnp.sin(angle_TH)
    first, second = jnp.split(x_BNTH.astype(jnp.float32), 2, axis=-1)
    turned = first * cos_TH - second * sin_TH, second * cos_TH + first * sin_TH
    return jnp.concatenate(turned, axis=-1).astype(x_BNTH.dtype)


def _qkv(p: Params, state: State, region: Region) -> State:
    (x_BTD,) = state
    normed_BTD = region.enter(rms_norm(p["attention_norm"]["scale"], x_BTD))
    # heads before positions, as in prenorm.py
    q_BNTH = dense(normed_BTD, p["attention"]["q"]).transpose(0, 2, 1, 3)
    k_BKTH, v_BKTH = dense(normed_BTD, p["attention"]["kv"]).transpose(2, 0, 3, 1, 4)
    return x_BTD, *region.keep("qkv_proj", (rotate(q_BNTH), rotate(k_BKTH), v_BKTH))


def _out(p: Params, state: State, region: Region) -> State:
    x_BTD, mixed_BTD = state
    out_BTD = region.leave(join_heads(mixed_BTD, p["attention"]["out"]))
    return (x_BTD + region.keep("out_proj", out_BTD),)


def _up(p: Params, state: State, region: Region) -> State:
    (x_BTD,) = state
    normed_BTD = region.enter(rms_norm(p["mlp_norm"]["scale"], x_BTD))
    up_BTCF = region.keep("mlp_up", dense(normed_BTD, p["mlp"]["up"]))
    return x_BTD, jax.nn.silu(up_BTCF[:, :, 0]) * up_BTCF[:, :, 1]


def _down(p: Params, state: State, region: Region) -> State:
    x_BTD, hidden_BTF = state
    down_BTD = region.leave(dense(hidden_BTF, p["mlp"]["down"]))
    return (x_BTD + down_BTD,)
