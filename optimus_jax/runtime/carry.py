"""What a tick reads and updates: the carry of the scan over ticks, and the row of the table."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from optimus_jax.models.weights import Params
from optimus_jax.schedule.program import Columns


class Carry(NamedTuple):
    """What the ticks update in place.

    `wire` [slots, rows, T, D] and `feature` [slots, unit rows, P, D] hold values on their way;
    `saved` [slots, layers + 1, rows, T, D] and `encoder` [slots, layers + 1, unit rows, P, width]
    the inputs of layers, the last entry an output. `grads` are float32 sums. `nans` counts tasks
    and exchanges with NaN in the first element of their result. Every loop of a tick derives it
    from what it computed, so none can be moved past another: only then does XLA update a buffer in
    place that an earlier loop reads (a plain counter will not do, XLA takes it out of the loops).
    """

    wire: jax.Array
    feature: jax.Array
    saved: jax.Array
    encoder: jax.Array
    grads: Params
    loss: jax.Array
    nans: jax.Array

    def after(self, result: jax.Array) -> Carry:
        """The carry with `result`'s NaN counted."""
        return self._replace(nans=self.nans + jnp.isnan(result.ravel()[0]))


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
