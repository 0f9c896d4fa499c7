"""Pieces of an encoder layer beside the tensor-parallel collectives of an LLM layer.

Where a kernel runs cannot be commanded, but it can be tied: a barrier before a collective ties its
input to a piece's input, one after it their results. XLA's latency-hiding scheduler then puts the
piece between the collective's start and its done.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from optimus_jax.models.weights import Params
from optimus_jax.parallel.tensor import Collective, TensorRegion

State = Any
Piece = Callable[[State], State]


class PairedRegion(TensorRegion):
    """A tensor region whose next collectives have `pieces` of other work beside them.

    `windows` says of each collective to come, in order, whether it gets some: one whose result is
    not needed gets none. The pieces are dealt out evenly over those that do. `finish` gives the
    state after all pieces. Without `tied`, pieces run where XLA likes: what pairing is compared
    with.
    """

    def __init__(
        self,
        region: TensorRegion,
        pieces: Sequence[Piece],
        state: State,
        windows: Sequence[bool],
        tied: bool = True,
        forward_only: bool = False,
    ):
        super().__init__(region.axes, region.size, region.sequence, forward_only)
        self.state, self.tied = state, tied
        wanted = sum(windows)
        self._shares: list[list[Piece]] = []
        start = n = 0
        for paired in windows:
            n += paired
            end = len(pieces) * n // wanted if wanted else 0
            self._shares.append(list(pieces[start:end]))
            start = end
        self._rest = list(pieces[start:])

    def around(self, collective: Collective, x: jax.Array) -> jax.Array:
        share = self._shares.pop(0) if self._shares else []
        if not share:
            return super().around(collective, x)
        if self.tied:
            x, self.state = lax.optimization_barrier((x, self.state))
        with jax.named_scope("paired"):
            y = super().around(collective, x)
        for piece in share:
            self.state = piece(self.state)
        if self.tied:
            y, self.state = lax.optimization_barrier((y, self.state))
        return y

    def finish(self) -> State:
        """The state after the pieces that found no collective, too."""
        for piece in (piece for share in [*self._shares, self._rest] for piece in share):
            self.state = piece(self.state)
        self._shares, self._rest = [], []
        return self.state


class Counting(TensorRegion):
    """Counts the collectives that run through it."""

    count = 0

    def around(self, collective: Collective, x: jax.Array) -> jax.Array:
        self.count += 1
        return super().around(collective, x)


def backward_pieces(
    pieces: Sequence[Callable[[Params, State], State]], params: Params
) -> list[Piece]:
    """The backward of an encoder layer in pieces, from its forward in pieces.

    They run on a state (x, dy, gradients): first those of the forward on x, which leave behind what
    their own backwards need, then these in reverse on dy. The last forward stands with its own
    backward: its result is not needed, and alone it would be dead code. Gradients of a weight are
    added up.
    """
    leaves, tree = jax.tree.flatten(params)
    vjps: list[tuple[list[int], Any]] = []

    def forward(piece: Callable[[Params, State], State], state: State) -> State:
        x, dy, grads = state
        used = _used(piece, params, x)

        def partly(some: list[jax.Array], x: State) -> State:
            every = list(leaves)
            for k, leaf in zip(used, some, strict=True):
                every[k] = leaf
            return piece(jax.tree.unflatten(tree, every), x)

        y, vjp = jax.vjp(partly, [leaves[k] for k in used], x)
        vjps.append((used, vjp))
        return y, dy, grads

    def backward(state: State) -> State:
        x, dy, grads = state
        used, vjp = vjps.pop()
        some, dx = vjp(dy)
        grads = dict(grads)
        for k, g in zip(used, some, strict=True):
            grads[k] = grads[k] + g if k in grads else g
        return x, dx, grads

    def last(state: State) -> State:
        _, dy, grads = forward(pieces[-1], state)
        return backward((state[0], dy, grads))

    rest = pieces[:-1]
    return [*(functools.partial(forward, piece) for piece in rest), last, *[backward] * len(rest)]


def gradients_of(grads: dict[int, jax.Array], params: Params) -> Params:
    """The gradients that backward pieces have gathered, as a tree like the weights."""
    leaves, tree = jax.tree.flatten(params)
    zero = jax.numpy.zeros_like
    return jax.tree.unflatten(tree, [grads.get(k, zero(x)) for k, x in enumerate(leaves)])


def _used(piece: Callable[[Params, State], State], params: Params, x: State) -> list[int]:
    """Which leaves of the weights a piece reads."""
    jaxpr = jax.make_jaxpr(piece)(params, x).jaxpr
    count = len(jax.tree.leaves(params))
    read = {id(v) for eqn in jaxpr.eqns for v in eqn.invars}
    return [k for k, v in enumerate(jaxpr.invars[:count]) if id(v) in read]
