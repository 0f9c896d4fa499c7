"""What a tick reads and updates: the carry of the scan over ticks, and the row of the table."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optimus_jax.models.weights import Params
from optimus_jax.runtime.buffers import add_at, load
from optimus_jax.schedule.program import Columns

Kept = dict[str, Any]  # by name, an array or a tuple of them


class EncoderCarry(NamedTuple):
    """An encoder's slots. Dimensions: p own positions, P all of them, width the encoder's.

    `feature` [slots, unit rows, P, D] and `hidden` [slots, unit rows, p, width] hold values on
    their way; `saved` [slots, layers + 1, unit rows, p, width] the inputs of a stage's layers, the
    last entry an output; `kept` [slots, layers, ...] what a backward does not compute again.
    """

    feature: jax.Array
    hidden: jax.Array
    saved: jax.Array
    kept: Kept


class Carry(NamedTuple):
    """What the ticks update in place.

    `wire` [slots, rows, t, D] holds LLM values on their way, `saved` [slots, layers + 1, rows, t,
    D] and `kept` are as an encoder's, with t the tensor shard's own positions. `grads` are sums
    over microbatches. `nans` counts tasks and exchanges with NaN at the start of their result.
    Every loop of a tick derives it from what it computed, so none can be moved past another: only
    then does XLA update a buffer in place that an earlier loop reads (a plain counter will not do,
    XLA takes it out of the loops).
    """

    wire: jax.Array
    saved: jax.Array
    kept: Kept
    encoders: tuple[EncoderCarry, ...]
    grads: Params
    loss: jax.Array
    nans: jax.Array

    def after(self, result: jax.Array) -> Carry:
        """The carry with `result`'s NaN counted."""
        return self._replace(nans=self.nans + jnp.isnan(result.ravel()[0]))

    def encoder(self, k: int, **changed: object) -> Carry:
        """The carry with some of encoder k's slots replaced."""
        parts = list(self.encoders)
        parts[k] = parts[k]._replace(**changed)
        return self._replace(encoders=tuple(parts))

    def add(self, path: tuple[str, ...], values: Params) -> Carry:
        """The carry with the gradients `values` added to those at `path`."""
        part = self.grads
        for name in path:
            part = part[name]
        return self.with_grads(path, add_at(part, values))

    def with_grads(self, path: tuple[str, ...], values: Params) -> Carry:
        """The carry with the gradients at `path` replaced."""
        return self._replace(grads=_with(self.grads, path, values))


class Row(dict[str, jax.Array]):
    """The columns of one device's row at one tick, by name (schedule/program.py, Columns), and
    `table`, the row as it stands there."""

    def __init__(self, table: jax.Array, columns: Columns):
        super().__init__({name: table[where] for name, where in columns.at.items()}, table=table)
        self.columns = columns

    __getattr__ = dict.__getitem__

    def at(self, zero: jax.Array) -> Row:
        """The same row for use in the loop that `zero` is from (see buffers.when)."""
        return Row(self.table + zero, self.columns)


def staged_gradients(grads: Params) -> Params:
    """Sums of gradients, of the LLM, of encoders or of both, as the weights have it: with the
    dimension of stages, of which a device has one, and in their own dtype."""
    made, grads = {}, jax.tree.map(load, grads)
    if "llm" in grads:
        layers = jax.tree.map(lambda g: g[:, None], grads["llm"]["layers"])
        made["llm"] = {**grads["llm"], "layers": layers}
    if "encoders" in grads:
        made["encoders"] = {
            name: {**part, "layers": jax.tree.map(lambda g: g[None], part["layers"])}
            for name, part in grads["encoders"].items()
        }
    return made


def _with(tree: Params, path: tuple[str, ...], value: Params) -> Params:
    """The tree with the part at `path` replaced."""
    first, *rest = path
    return {**tree, first: _with(tree[first], tuple(rest), value) if rest else value}
