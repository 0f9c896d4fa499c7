"""Tensor parallelism: what a layer's region means where several devices share its weights.

Products come in pairs, the first weight cut by columns and the second by rows (Megatron-LM,
Shoeybi et al. 2019, section 3); between pairs either every rank has all positions, or each has its
own share of them (sequence parallelism, Korthikanti et al. 2022, section 4.2.2). Each collective
is one half of a conjugate pair: the transpose of a psum is not the gradient that is meant inside
shard_map without replication checks, so each pair states its own backward.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import lax

from optimus_jax.models.region import Region

Collective = Callable[[jax.Array], jax.Array]
POSITIONS = 1


class TensorRegion(Region):
    """One rank of a tensor group, inside shard_map(check_vma=False).

    `axes` of the grid make up the group of `size` devices; with `sequence`, positions are cut over
    it between products, and their number must divide by `size`. With `forward_only`, collectives
    stand bare, without their gradients: what `around` then sees belongs to the caller's trace,
    where the body of a custom_vjp that is not being differentiated has a trace of its own.
    """

    def __init__(
        self, axes: tuple[str, ...], size: int, sequence: bool = False, forward_only: bool = False
    ):
        self.axes, self.size, self.sequence = axes, size, sequence
        self.forward_only = forward_only

    def around(self, collective: Collective, x: jax.Array) -> jax.Array:
        """Every collective, forward and backward, runs through here, so that a subclass may pair
        other work with it."""
        return collective(x)

    def enter(self, x: jax.Array) -> jax.Array:
        if self.sequence:
            return self._pair(self._gather, self._scatter, x)
        return self._pair(None, self._sum, x)

    def leave(self, y: jax.Array) -> jax.Array:
        if self.sequence:
            return self._pair(self._scatter, self._gather, y)
        return self._pair(self._sum, None, y)

    def leave_whole(self, y: jax.Array) -> jax.Array:
        return self._pair(self._sum, None, y)

    def shard(self, x: jax.Array) -> jax.Array:
        """The gradient is whole on every rank, as x is."""
        return self._pair(self._own, self._gather, x) if self.sequence else x

    def rank(self) -> jax.Array:
        return lax.axis_index(self.axes)

    def sum(self, x: jax.Array) -> jax.Array:
        """What follows is the same on every rank, so its gradient is that of each rank's part."""
        return self._pair(self._sum, None, x)

    def max(self, x: jax.Array) -> jax.Array:
        return self.around(lambda x: lax.pmax(x, self.axes), lax.stop_gradient(x))

    def _pair(
        self, forward: Collective | None, backward: Collective | None, x: jax.Array
    ) -> jax.Array:
        """`forward` of x, with `backward` as its gradient; None stands for the identity."""

        def run(step: Collective | None, x: jax.Array) -> jax.Array:
            return x if step is None else step(x)

        if self.forward_only:
            return run(forward, x)
        pair = jax.custom_vjp(lambda x: run(forward, x))
        pair.defvjp(lambda x: (run(forward, x), None), lambda _, g: (run(backward, g),))
        return pair(x)

    def _sum(self, x: jax.Array) -> jax.Array:
        return self.around(lambda x: lax.psum(x, self.axes), x)

    def _gather(self, x: jax.Array) -> jax.Array:
        return self.around(lambda x: lax.all_gather(x, self.axes, axis=POSITIONS, tiled=True), x)

    def _scatter(self, x: jax.Array) -> jax.Array:
        def scatter(x: jax.Array) -> jax.Array:
            return lax.psum_scatter(x, self.axes, scatter_dimension=POSITIONS, tiled=True)

        return self.around(scatter, x)

    def _own(self, x: jax.Array) -> jax.Array:
        share = x.shape[POSITIONS] // self.size
        return lax.dynamic_slice_in_dim(x, self.rank() * share, share, POSITIONS)


def is_partial(path: tuple[str, ...], cut: bool, sequence: bool) -> bool:
    """Whether ranks have different parts of a weight's gradient, to be summed over the tensor axes.

    `path` names the weight in the tree of all weights. A weight that is `cut` over the tensor axes
    never has. Of the others, the norms of queries and keys see a rank's own heads; with `sequence`
    parallelism, what stands between products sees its own positions: everything in layers, the
    norms of head and projector. Embeddings, positions and last biases are whole on every rank.
    """
    if cut:
        return False
    if "qk_norm" in path:
        return True
    return sequence and ("layers" in path or path[-2] == "norm")
