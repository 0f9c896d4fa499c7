"""The parts that encoder and LLM are made of: declarations, and pure functions of their values.

Dimensions: B rows, T positions, N heads, H head width, D width, F hidden width, V vocabulary,
P patches. Weights are float32 masters; the functions compute in the dtype of `x` and of the weights
they are given, with normalisation and softmax in float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from optimus_jax.models.weights import Params, constant, weight


class LayerNorm(nnx.Module):
    def __init__(self, width: int):
        self.scale = constant((width,), ("width",), 1.0)
        self.bias = constant((width,), ("width",), 0.0)


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, width: int, heads: int, gain: float):
        head, scale = width // heads, width**-0.5
        self.qkv = weight(rngs, (width, 3, heads, head), ("width", None, "heads", None), scale)
        self.qkv_bias = constant((3, heads, head), (None, "heads", None), 0.0)
        self.out = weight(rngs, (heads, head, width), ("heads", None, "width"), gain * scale)
        self.out_bias = constant((width,), ("width",), 0.0)


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, width: int, hidden: int, out: int, gain: float):
        self.up = weight(rngs, (width, hidden), ("width", "hidden"), width**-0.5)
        self.up_bias = constant((hidden,), ("hidden",), 0.0)
        self.down = weight(rngs, (hidden, out), ("hidden", "width"), gain * hidden**-0.5)
        self.down_bias = constant((out,), ("width",), 0.0)


class Block(nnx.Module):
    """A pre-norm transformer layer. Weights start with the inverse root of their inputs, times a
    gain for what is added to the residual, which is smaller in deep stacks (GPT-2)."""

    def __init__(self, rngs: nnx.Rngs, width: int, heads: int, hidden: int, layers: int):
        gain = (2 * layers) ** -0.5
        self.attention_norm = LayerNorm(width)
        self.attention = Attention(rngs, width, heads, gain)
        self.mlp_norm = LayerNorm(width)
        self.mlp = Mlp(rngs, width, hidden, width, gain)


def layer_norm(p: Params, x_BTD: jax.Array) -> jax.Array:
    x = x_BTD.astype(jnp.float32)
    x = x - x.mean(-1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)
    return (x * p["scale"] + p["bias"]).astype(x_BTD.dtype)


def dense(x_BTD: jax.Array, kernel: jax.Array) -> jax.Array:
    """[B, T, D] times [D, ...]: one product of two matrices. With three dimensions, XLA on a CPU
    turns both operands of the kernel's gradient over in memory first."""
    rows, length, width = x_BTD.shape
    y = x_BTD.reshape(rows * length, width) @ kernel.reshape(width, -1)
    return y.reshape(rows, length, *kernel.shape[1:])


def attention(p: Params, x_BTD: jax.Array, causal: bool) -> jax.Array:
    qkv_BTCNH = dense(x_BTD, p["qkv"]) + p["qkv_bias"]
    # heads before positions: XLA's products on a CPU want each head's rows together
    q_BNTH, k_BNTH, v_BNTH = qkv_BTCNH.transpose(2, 0, 3, 1, 4)
    logits_BNTS = jnp.einsum("BNTH,BNSH->BNTS", q_BNTH, k_BNTH).astype(jnp.float32)
    logits_BNTS = logits_BNTS * q_BNTH.shape[-1] ** -0.5
    if causal:
        length = x_BTD.shape[1]
        seen_TS = jnp.tril(jnp.ones((length, length), bool))
        logits_BNTS = jnp.where(seen_TS[None, None], logits_BNTS, -jnp.inf)
    share_BNTS = jax.nn.softmax(logits_BNTS, axis=-1).astype(x_BTD.dtype)
    mixed_BNTH = jnp.einsum("BNTS,BNSH->BNTH", share_BNTS, v_BNTH)
    mixed_BTD = mixed_BNTH.transpose(0, 2, 1, 3).reshape(*x_BTD.shape[:2], -1)
    return dense(mixed_BTD, p["out"].reshape(-1, p["out"].shape[-1])) + p["out_bias"]


def mlp(p: Params, x_BTD: jax.Array) -> jax.Array:
    hidden_BTF = jax.nn.gelu(dense(x_BTD, p["up"]) + p["up_bias"])
    return dense(hidden_BTF, p["down"]) + p["down_bias"]


def block(p: Params, x_BTD: jax.Array, causal: bool) -> jax.Array:
    x_BTD = x_BTD + attention(p["attention"], layer_norm(p["attention_norm"], x_BTD), causal)
    return x_BTD + mlp(p["mlp"], layer_norm(p["mlp_norm"], x_BTD))
