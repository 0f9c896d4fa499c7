"""Kernels of one tensor shard's layer, each as a function of arrays that a loop runs many times.

Names and passes are those of cost/kernels.py, so that each stands beside what is predicted of it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optimus_jax.config import EncoderConfig, LlmConfig
from optimus_jax.cost.transformer import Transformer
from optimus_jax.models import blocks
from optimus_jax.models.layers import attend, dense, norm, rms_norm
from optimus_jax.models.region import SEQUENTIAL, Region
from optimus_jax.models.weights import initialise, logical_axes

Tree = Any
CUT = "heads", "hidden"  # the logical axes that tensor shards share


@dataclasses.dataclass(frozen=True)
class Shard:
    """One of `tp` shards of a layer of `model`, on `rows` sequences of `length` positions."""

    model: Transformer
    rows: int
    length: int
    tp: int

    @property
    def own(self) -> int:
        """Positions of a sequence that this shard's norms have."""
        return self.length // self.tp

    @property
    def part(self) -> EncoderConfig | LlmConfig:
        """The whole layer as a configuration has it."""
        m = self.model
        if m.causal:
            return LlmConfig(layers=1, width=m.width, heads=m.heads, hidden=m.hidden)
        sizes = {"layers": 1, "width": m.width, "heads": m.heads, "hidden": m.hidden}
        return EncoderConfig(**sizes, patch=14, block="vit22b" if m.parallel_block else "vit")


@dataclasses.dataclass(frozen=True)
class Run:
    """What is timed: `function(*operands)`. Nothing in it may depend on other operands than the
    first alone, or XLA moves it out of the loop. With `adds`, the first result takes the place of
    the last operand."""

    function: Callable[..., Tree]
    operands: tuple[Tree, ...]
    adds: bool = False

    def loop(self, trips: int) -> Callable[..., Tree]:
        """The function `trips` times in a row. Between two times a number of each result goes into
        the first operand, so none can be left out, and the barrier keeps XLA from computing these
        numbers alone."""

        def body(_: jax.Array, carry: tuple[Tree, ...]) -> tuple[Tree, ...]:
            out = lax.optimization_barrier(self.function(*carry))
            first, *others = carry
            number = sum(x[(0,) * x.ndim] for x in jax.tree.leaves(out))
            number = jnp.clip(number, -1, 1).astype(first.dtype)
            if self.adds:
                others[-1] = out[0]
            return first.at[(0,) * first.ndim].set(number), *others

        return lambda *operands: lax.fori_loop(0, trips, body, operands)


def random(key: int, *shape: int, dtype: str) -> jax.Array:
    """Normal values, which come again after a million: drawn on the host, since XLA would compile a
    generator for each shape."""
    return jax.device_put(np.resize(_normal(key).astype(dtype), shape))


@functools.cache
def _normal(key: int) -> np.ndarray:
    return np.random.default_rng(key).normal(size=1_000_003).astype(np.float32)


def full(value: float, *shape: int, dtype: str = "float32") -> jax.Array:
    return jax.device_put(np.full(shape, value, dtype))


def attention(core: str, causal: bool) -> Callable[..., jax.Array]:
    """Of q, k, v [B, N, T, H] to [B, T, N x H]: "plain" is the model's own, others are
    implementations of jax.nn.dot_product_attention."""
    if core == "plain":
        return lambda q, k, v: attend(q, k, v, causal, SEQUENTIAL)

    def fused(*qkv_BNTH: jax.Array) -> jax.Array:
        q, k, v = (x.transpose(0, 2, 1, 3) for x in qkv_BNTH)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation=core)
        return mixed.reshape(*q.shape[:2], -1)

    return fused


def kernels(
    shard: Shard, cores: tuple[str, ...], dtype: str
) -> Iterator[tuple[str, str, str, Callable[[], Run]]]:
    """Pass, name, core ("" but for attention) and what makes the Run of each kernel that computes.
    Products are without biases; a norm adds the residual first, as predicted."""
    m, tp, n = shard.model, shard.tp, shard.rows * shard.length
    heads, f = m.heads // tp, m.hidden // tp
    q = heads * m.head_dim
    array = partial(random, dtype=dtype)
    matrices = {
        "qkv": (m.width, 3 * q),
        "out": (q, m.width),
        "up": (m.width, f),
        "down": (f, m.width),
    }
    own = shard.rows, shard.own, m.width
    scale: Tree = {"scale": full(1, m.width, dtype=dtype)}
    if not m.parallel_block:
        scale["bias"] = full(0, m.width, dtype=dtype)

    def normed(s: jax.Array, p: Tree) -> jax.Array:
        return norm(p, s)

    def norm_back(s: jax.Array, g: jax.Array, more: jax.Array, p: Tree) -> Tree:
        ds, dp = jax.vjp(normed, s, p)[1](g)
        return ds + more, dp

    def norm_forward(x: jax.Array, more: jax.Array, p: Tree) -> Tree:
        return x + more, norm(p, x + more)

    for name in ("norm",) if m.parallel_block else ("attention_norm", "mlp_norm"):
        yield (
            "forward",
            name,
            "",
            lambda: Run(norm_forward, (array(0, *own), array(1, *own), scale)),
        )
        yield (
            *("backward", name, ""),
            lambda: Run(norm_back, (array(0, *own), array(1, *own), array(2, *own), scale)),
        )
    for name, (a, b) in matrices.items():
        yield (
            *("forward", name, ""),
            lambda a=a, b=b: Run(dense, (array(0, 1, n, a), array(1, a, b))),
        )
        yield (
            *("backward", f"{name}_input_gradient", ""),
            lambda a=a, b=b: Run(lambda g, w: g @ w.T, (array(0, n, b), array(1, a, b))),
        )
        yield (
            *("backward", f"{name}_weight_gradient", ""),
            lambda a=a, b=b: Run(
                lambda x, g, total: (total + (x.T @ g).astype(total.dtype),),
                (array(0, n, a), array(1, n, b), full(0, a, b)),
                adds=True,
            ),
        )
    per_head = shard.rows, heads, shard.length, m.head_dim
    if m.qk_norm:
        scales = full(1, 2, 1, 1, 1, m.head_dim, dtype=dtype)

        def qk(x: jax.Array, s: jax.Array) -> jax.Array:
            return rms_norm(s, x)

        yield "forward", "qk_norm", "", lambda: Run(qk, (array(0, 2, *per_head), scales))
        yield (
            *("backward", "qk_norm", ""),
            lambda: Run(
                lambda x, g, s: jax.vjp(qk, x, s)[1](g),
                (array(0, 2, *per_head), array(1, 2, *per_head), scales),
            ),
        )
    for core in cores:

        def whole(core: str = core) -> Run:
            return Run(attention(core, m.causal), tuple(array(k, *per_head) for k in range(3)))

        def back(core: str = core) -> Run:
            made = whole(core)
            save = jax.jit(lambda *qkv: jax.vjp(made.function, *qkv)[1])
            g = array(3, shard.rows, shard.length, q)
            return Run(lambda g, saved: saved(g), (g, save(*made.operands)))

        yield "forward", "attention", core, whole
        yield "backward", "attention", core, back
    yield "forward", "activation", "", lambda: Run(jax.nn.gelu, (array(0, n, f),))
    yield (
        *("backward", "activation", ""),
        lambda: Run(lambda x, g: jax.vjp(jax.nn.gelu, x)[1](g), (array(0, n, f), array(1, n, f))),
    )


class Alone(Region):
    """One rank of a tensor group with sequence parallelism, without the others: in place of their
    positions it takes its own once more. The barriers keep copies and cuts out of the products."""

    def __init__(self, size: int):
        self.size = size

        def gather(x: jax.Array) -> jax.Array:
            return lax.optimization_barrier(jnp.tile(x, (1, size, 1)))

        def scatter(y: jax.Array) -> jax.Array:
            return lax.optimization_barrier(y)[:, : y.shape[1] // size]

        def pair(there: Callable[..., Any], back: Callable[..., Any]) -> Callable[..., Any]:
            both = jax.custom_vjp(there)
            both.defvjp(lambda x: (there(x), None), lambda _, g: (back(g),))
            return both

        self._enter, self._leave = pair(gather, scatter), pair(scatter, gather)

    def enter(self, x: jax.Array) -> jax.Array:
        return self._enter(x)

    def leave(self, y: jax.Array) -> jax.Array:
        return self._leave(y)


def weights(shard: Shard, dtype: str) -> Tree:
    """Of one shard: the layer's, cut along heads and hidden."""
    declare = blocks.declare(shard.part)
    shapes = jax.eval_shape(lambda key: initialise(declare, key), jax.random.key(0))

    def cut(names: tuple[str | None, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        shape = [d // shard.tp if a in CUT else d for a, d in zip(names, leaf.shape, strict=True)]
        gain = math.prod(leaf.shape[:-1]) ** -0.5 if len(shape) > 1 else 1.0
        return jax.device_put(np.resize((gain * _normal(len(shape))).astype(dtype), shape))

    axes = logical_axes(declare)
    return jax.tree.map(cut, axes, shapes, is_leaf=lambda x: isinstance(x, tuple))


def layer(shard: Shard, core: str, dtype: str, backward: bool) -> Run:
    """The model's own layer with this attention: its forward, or forward and backward with the
    gradients of the weights added up in float32, as a training step does."""
    steps, region = list(blocks.pieces(shard.part)), Alone(shard.tp)
    if core != "plain":
        mix = attention(core, shard.model.causal)

        def mixed(p: Tree, state: Tree, region: Region) -> Tree:
            *before, (q, k, v) = state
            if shard.model.qk_norm:
                scales = p["attention"]["qk_norm"]
                q = rms_norm(scales["query_scale"], q)
                k = rms_norm(scales["key_scale"], k)
            return *before, mix(q, k, v)

        steps[1] = mixed
    x, g = (random(k, shard.rows, shard.own, shard.model.width, dtype=dtype) for k in range(2))
    p = weights(shard, dtype)

    def run(p: Tree, x: jax.Array) -> jax.Array:
        return blocks.run(tuple(steps), p, x, region)

    if not backward:
        return Run(lambda x, p: run(p, x), (x, p))

    def both(x: jax.Array, g: jax.Array, p: Tree, total: Tree) -> Tree:
        y, pull = jax.vjp(run, p, x)
        dp, dx = pull(g)
        return jax.tree.map(lambda t, d: t + d.astype(t.dtype), total, dp), y, dx

    return Run(both, (x, g, p, jax.tree.map(lambda w: full(0, *w.shape), p)), adds=True)
