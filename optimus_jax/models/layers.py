"""The parts that blocks are made of: declarations, and pure functions of their values.

Dimensions: B rows, T positions, N heads, K heads of keys and values, H head width, D width, F
hidden width, V vocabulary, P positions of features. Weights are float32 masters; the functions
compute in the dtype of `x` and of the weights they are given, with normalisation and softmax in
float32. Where several devices share the weights, the functions see one rank's share of N, K, F, V.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from optimus_jax.models.region import SEQUENTIAL, Region
from optimus_jax.models.weights import Params, constant, weight

EPSILON = 1e-5

State = tuple[jax.Array, ...]
Piece = Callable[[Params, State, Region], State]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of one layer; `layers` is the length of the stack that it stands in."""

    width: int
    heads: int
    kv_heads: int
    hidden: int
    layers: int

    @property
    def head(self) -> int:
        return self.width // self.heads

    @property
    def gain(self) -> float:
        """Weights start with the inverse root of their inputs, times this for what is added to the
        residual, which is smaller in deep stacks (GPT-2)."""
        return (2 * self.layers) ** -0.5


class LayerNorm(nnx.Module):
    def __init__(self, width: int):
        self.scale = constant((width,), ("width",), 1.0)
        self.bias = constant((width,), ("width",), 0.0)


class RmsNorm(nnx.Module):
    def __init__(self, width: int):
        self.scale = constant((width,), ("width",), 1.0)


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, width: int, hidden: int, out: int, gain: float):
        self.up = weight(rngs, (width, hidden), ("width", "hidden"), width**-0.5)
        self.up_bias = constant((hidden,), ("hidden",), 0.0)
        self.down = weight(rngs, (hidden, out), ("hidden", "width"), gain * hidden**-0.5)
        self.down_bias = constant((out,), ("width",), 0.0)


def norm(p: Params, x_BTD: jax.Array) -> jax.Array:
    """The norm that the weights belong to: RMSNorm has no bias."""
    return layer_norm(p, x_BTD) if "bias" in p else rms_norm(p["scale"], x_BTD)


def layer_norm(p: Params, x_BTD: jax.Array) -> jax.Array:
    x = x_BTD.astype(jnp.float32)
    x = x - x.mean(-1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPSILON)
    return (x * p["scale"] + p["bias"]).astype(x_BTD.dtype)


def rms_norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    """Along the last dimension (Zhang and Sennrich 2019)."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + EPSILON)
    return (y * scale).astype(x.dtype)


def dense(x_BTD: jax.Array, kernel: jax.Array) -> jax.Array:
    """[B, T, D] times [D, ...]: one product of two matrices. With three dimensions, XLA on a CPU
    turns both operands of the kernel's gradient over in memory first."""
    rows, length, width = x_BTD.shape
    y = x_BTD.reshape(rows * length, width) @ kernel.reshape(width, -1)
    return y.reshape(rows, length, *kernel.shape[1:])


def join_heads(mixed_BTD: jax.Array, kernel_NHD: jax.Array) -> jax.Array:
    """Mixed values of all heads, side by side, to the block's width."""
    return dense(mixed_BTD, kernel_NHD.reshape(-1, kernel_NHD.shape[-1]))


def attend(
    q_BNTH: jax.Array, k_BKTH: jax.Array, v_BKTH: jax.Array, causal: bool, region: Region
) -> jax.Array:
    """Mixed values [B, T, N x H]. The N / K heads of a group stand next to one another and share
    keys and values (grouped-query attention, Ainslie et al. 2023)."""
    rows, heads, length, head = q_BNTH.shape
    # the positions of a group's heads as one dimension: one product for each head of keys
    q_BKGH = q_BNTH.reshape(rows, k_BKTH.shape[1], -1, head)
    logits_BKGS = jnp.einsum("BKGH,BKSH->BKGS", q_BKGH, k_BKTH).astype(jnp.float32)
    logits_BNTS = logits_BKGS.reshape(rows, heads, length, length) * head**-0.5
    if causal:
        seen_TS = jnp.tril(jnp.ones((length, length), bool))
        logits_BNTS = jnp.where(seen_TS[None, None], logits_BNTS, -jnp.inf)
    share_BNTS = jax.nn.softmax(jax.lax.stop_gradient(logits_BNTS), axis=-1)
    share_BNTS = _share(logits_BNTS, region.keep("scores", share_BNTS)).astype(q_BNTH.dtype)
    mixed_BKGH = jnp.einsum("BKGS,BKSH->BKGH", share_BNTS.reshape(logits_BKGS.shape), v_BKTH)
    mixed_BTNH = mixed_BKGH.reshape(q_BNTH.shape).transpose(0, 2, 1, 3)
    return region.keep("attention", mixed_BTNH.reshape(rows, length, -1))


@jax.custom_vjp
def _share(logits: jax.Array, share: jax.Array) -> jax.Array:
    """`share`, the softmax of the logits, with a gradient that needs nothing but itself: the
    logits of a kept softmax are then dead code."""
    return share


def _share_forward(logits: jax.Array, share: jax.Array) -> tuple[jax.Array, jax.Array]:
    return share, share


def _share_backward(share: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = share * gradient
    return y - share * y.sum(-1, keepdims=True), jnp.zeros_like(share)


_share.defvjp(_share_forward, _share_backward)


def mlp(p: Params, x_BTD: jax.Array, region: Region = SEQUENTIAL) -> jax.Array:
    """GELU between two affine maps, to whole positions."""
    hidden_BTF = jax.nn.gelu(dense(region.enter(x_BTD), p["up"]) + p["up_bias"])
    return region.leave_whole(dense(hidden_BTF, p["down"])) + p["down_bias"]
