"""Where a layer's work meets the other devices that share it.

A layer calls a region at the points where a tensor-parallel run acts; a plain Region is the
sequential meaning, in which every call is the identity. parallel/tensor.py has the other meaning.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Tree = Any

# The activations that a forward saves, by recompute policy. What lies between them (norms, the
# MLP's activation function, gathers over tensor shards) a backward computes again under each of
# them. No gradient needs a layer's last product, and the next layer's input, which contains it, is
# saved anyway.
POLICIES: dict[str, tuple[str, ...]] = {
    "full": (),
    "selective": ("qkv_proj", "attention", "out_proj", "mlp_up"),
    "none": ("qkv_proj", "attention", "out_proj", "mlp_up", "scores"),
}


class Region:
    """One device that holds whole weights. Arrays are [rows, positions, ...] unless said."""

    size: int = 1

    def enter(self, x: jax.Array) -> jax.Array:
        """What a product with a weight cut by columns takes: whole positions."""
        return x

    def leave(self, y: jax.Array) -> jax.Array:
        """The sum over ranks of partial products, of a weight cut by rows: each rank's own
        positions where the sequence is cut too, else whole positions."""
        return y

    def leave_whole(self, y: jax.Array) -> jax.Array:
        """The same, always whole positions."""
        return y

    def shard(self, x: jax.Array) -> jax.Array:
        """Own positions of whole ones that are the same on every rank."""
        return x

    def rank(self) -> int | jax.Array:
        """Which share of the cut weights this device holds, from 0."""
        return 0

    def sum(self, x: jax.Array) -> jax.Array:
        """Sum over ranks of an array of any shape, whole on each."""
        return x

    def max(self, x: jax.Array) -> jax.Array:
        """Greatest value over ranks, of any shape; a constant to gradients."""
        return jax.lax.stop_gradient(x)

    def keep(self, name: str, x: Tree) -> Tree:
        """A named activation (an array or a tuple of them) that a recompute policy may save:
        qkv_proj, scores (after the softmax), attention (mixed values), out_proj, mlp_up."""
        return x


SEQUENTIAL = Region()


class Wrapped(Region):
    """Everything as another region has it; for those that differ in `keep`."""

    def __init__(self, region: Region):
        self.region, self.size = region, region.size

    def enter(self, x: jax.Array) -> jax.Array:
        return self.region.enter(x)

    def leave(self, y: jax.Array) -> jax.Array:
        return self.region.leave(y)

    def leave_whole(self, y: jax.Array) -> jax.Array:
        return self.region.leave_whole(y)

    def shard(self, x: jax.Array) -> jax.Array:
        return self.region.shard(x)

    def rank(self) -> int | jax.Array:
        return self.region.rank()

    def sum(self, x: jax.Array) -> jax.Array:
        return self.region.sum(x)

    def max(self, x: jax.Array) -> jax.Array:
        return self.region.max(x)

    def keep(self, name: str, x: Tree) -> Tree:
        return self.region.keep(name, x)


class Recording(Wrapped):
    """Notes in `saved` the activations named in `names`. For functions that are not being
    differentiated: inside `jax.vjp` the values would belong to its trace."""

    def __init__(self, region: Region, names: tuple[str, ...]):
        super().__init__(region)
        self.names = names
        self.saved: dict[str, Tree] = {}

    def keep(self, name: str, x: Tree) -> Tree:
        x = super().keep(name, x)
        if name in self.names:
            if name in self.saved:
                raise ValueError(f"{name} is kept twice: record one layer at a time")
            self.saved[name] = x
        return x


class Kept(Wrapped):
    """Gives the saved activations in place of the computed ones, which are then dead code; their
    gradients go on to the computed ones."""

    def __init__(self, region: Region, saved: dict[str, Tree]):
        super().__init__(region)
        self.saved = saved

    def keep(self, name: str, x: Tree) -> Tree:
        x = super().keep(name, x)
        return _instead(x, self.saved[name]) if name in self.saved else x


@jax.custom_vjp
def _instead(x: Tree, saved: Tree) -> Tree:
    """`saved`, with the gradient of x."""
    return saved


def _instead_forward(x: Tree, saved: Tree) -> tuple[Tree, None]:
    return saved, None


def _instead_backward(_: None, gradient: Tree) -> tuple[Tree, Tree]:
    return gradient, jax.tree.map(jnp.zeros_like, gradient)


_instead.defvjp(_instead_forward, _instead_backward)
