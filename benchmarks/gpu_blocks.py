"""One layer of the model with another attention core, forward and backward, and its operations.

The layer is the model's own (models/blocks.py), piece by piece; only the piece that mixes values
is exchanged, for one of jax.nn.dot_product_attention.
"""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optimus_jax.config import EncoderConfig, LlmConfig
from optimus_jax.cost.flops import Text, step_flops
from optimus_jax.cost.transformer import Transformer
from optimus_jax.models import blocks
from optimus_jax.models.layers import Piece, State, rms_norm
from optimus_jax.models.region import Region
from optimus_jax.models.weights import Params, initialise


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer and what it is timed on: `rows` sequences of `length` positions."""

    name: str
    part: EncoderConfig | LlmConfig
    rows: int
    length: int

    @property
    def kv_heads(self) -> int:
        return getattr(self.part, "kv_heads", 0) or self.part.heads

    @property
    def causal(self) -> bool:
        return isinstance(self.part, LlmConfig)

    def flops(self, exact: bool = False) -> float:
        """Operations of forward and backward, gradients of weights and input, as cost/flops.py
        counts them: nothing is computed again; `exact` counts causal attention by half."""
        part = self.part
        sizes = self.name, 1, part.width, part.heads, part.hidden, self.kv_heads
        model = Transformer(*sizes, gated=part.block == "llama", causal=self.causal)
        return step_flops(Text(model, self.rows, self.length, recompute="none"), exact=exact).model


def pieces(case: Case, core: str) -> tuple[Piece, ...]:
    """The layer's pieces; with a `core` other than "plain", the second is of that implementation
    of jax.nn.dot_product_attention: "cudnn" or "xla"."""
    first, mix, *others = blocks.pieces(case.part)
    return first, mix if core == "plain" else _fused(case, core), *others


def _fused(case: Case, core: str) -> Piece:
    def mix(p: Params, state: State, region: Region) -> State:
        before, (q, k, v) = _heads(case.part.block, p, state)
        q_BTNH, k_BTKH, v_BTKH = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
        mixed_BTNH = jax.nn.dot_product_attention(
            q_BTNH, k_BTKH, v_BTKH, is_causal=case.causal, implementation=core
        )
        return *before, mixed_BTNH.reshape(*q_BTNH.shape[:2], -1)

    return mix


def _heads(block: str, p: Params, state: Any) -> tuple[State, State]:
    """What a layer's second piece hands on, and q [B, N, T, H], k and v [B, K, T, H]."""
    if block == "llama":
        return state[:1], state[1:]
    if block == "vit22b":
        *before, (q, k, v) = state
        norm = p["attention"]["qk_norm"]
        q, k = rms_norm(norm["query_scale"], q), rms_norm(norm["key_scale"], k)
        return tuple(before), (q, k, v)
    return state[:1], tuple(state[1])


def init(case: Case, dtype: str, seed: int = 0) -> tuple[Params, jax.Array, jax.Array]:
    """Random weights without zeros, an input and a gradient of the output, both [B, T, D]."""
    declare = blocks.declare(case.part)
    shapes = jax.eval_shape(lambda key: initialise(declare, key), jax.random.key(0))
    leaves, tree = jax.tree.flatten_with_path(shapes)

    data = (case.rows, case.length, case.part.width)
    ends = np.cumsum([math.prod(leaf.shape) for _, leaf in leaves] + [math.prod(data)] * 2)

    @jax.jit
    def make(key: jax.Array) -> tuple[Params, jax.Array, jax.Array]:
        # one draw for all: XLA takes seconds to compile each on a CPU
        *drawn, x, g = jnp.split(jax.random.normal(key, (ends[-1],)), ends[:-1])
        made = []
        for values, (path, leaf) in zip(drawn, leaves, strict=True):
            name, shape = path[-1].key, leaf.shape
            if name in ("scale", "query", "key"):
                values = 1 + 0.1 * values
            elif name.endswith("bias"):
                values = 0.1 * values
            else:
                values *= (shape[0] * shape[1] if name == "out" else shape[0]) ** -0.5
            made.append(values.reshape(shape).astype(dtype))
        x, g = (y.reshape(data).astype(dtype) for y in (x, g))
        return jax.tree.unflatten(tree, made), x, g

    return make(jax.random.key(seed))


class JaxBlock:
    """Forward and backward of a case under jit, `iterations` times in a row."""

    def __init__(self, case: Case, core: str, start: tuple[Any, ...], iterations: int):
        self.start, self.iterations = start, iterations
        steps = pieces(case, core)

        @jax.jit
        def step(p: Params, x: jax.Array, g: jax.Array) -> tuple[jax.Array, Params, jax.Array]:
            y, back = jax.vjp(lambda p, x: blocks.run(steps, p, x), p, x)
            return y, *back(g)

        self.step = step

    def seconds(self) -> float:
        """Of one forward and backward."""
        start = time.perf_counter()
        for _ in range(self.iterations):
            out = self.step(*self.start)
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / self.iterations

    def results(self) -> list[jax.Array]:
        """Output, and the gradients of the input and of the matrix to queries."""
        y, grads, dx = self.step(*self.start)
        attention = grads["attention"]
        return [y, dx, attention["qkv"] if "qkv" in attention else attention["q"]]
