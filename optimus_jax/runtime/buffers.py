"""Slots in device memory, and loops that keep updating them in place.

XLA copies every array that passes through a conditional, so a tick has none: what may or may not
happen is a loop of zero or one trips over the carry (see `when`). A last, extra slot of each buffer
is trash: slot -1 reads and writes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

C = TypeVar("C")


def make(slots: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """`slots` buffers and the trash, all NaN: what is read before it is written shows."""
    return store(jnp.full((slots + 1, *shape), jnp.nan, dtype))


def store(x: jax.Array) -> jax.Array:
    """x as the carry holds it: bfloat16 as integers of the same bits. XLA on a CPU knows no updates
    of bfloat16 in place, it copies the whole buffer, to float32 and back, at each."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def load(x: jax.Array) -> jax.Array:
    """What `store` was given."""
    return lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x


def get(buffer: jax.Array, slot: jax.Array, *index: jax.Array | int) -> jax.Array:
    """The value in a slot (and at further leading indices)."""
    return load(buffer[(_address(buffer, slot), *index)])


def put(buffer: jax.Array, value: jax.Array, slot: jax.Array, *index: jax.Array | int) -> jax.Array:
    """The buffer with `value` in a slot (and at further leading indices), updated in place."""
    start = (_address(buffer, slot), *index)
    value = _as_stored(value, buffer)[(None,) * len(start)]
    return lax.dynamic_update_slice(buffer, value, (*start, *(0,) * (buffer.ndim - len(start))))


def keep(buffers: Any, values: Any, slot: jax.Array, *index: jax.Array | int) -> Any:
    """The tree of buffers with a tree of values in a slot of each."""
    return jax.tree.map(lambda b, v: put(b, v, slot, *index), buffers, values)


def kept_at(buffers: Any, slot: jax.Array, *index: jax.Array | int) -> Any:
    """The tree of values in a slot of each of a tree of buffers."""
    return jax.tree.map(lambda b: get(b, slot, *index), buffers)


def _address(buffer: jax.Array, slot: jax.Array) -> jax.Array:
    return jnp.where(slot < 0, buffer.shape[0] - 1, slot)


def add_at(total: Any, values: Any, *index: jax.Array | int) -> Any:
    """Adds a tree of values to a tree of totals, at leading indices of each total, in place."""

    def one(total: jax.Array, value: jax.Array) -> jax.Array:
        value = _as_stored(load(total[index]) + value, total)
        if not index:
            return value
        start = (*index, *(0,) * value.ndim)
        return lax.dynamic_update_slice(total, value[(None,) * len(index)], start)

    return jax.tree.map(one, total, values)


def _as_stored(value: jax.Array, buffer: jax.Array) -> jax.Array:
    """`value` as a buffer has it."""
    return store(value.astype(jnp.bfloat16 if buffer.dtype == jnp.uint16 else buffer.dtype))


def when(condition: jax.Array, body: Callable[[jax.Array, C], C], carry: C) -> C:
    """body(zero, carry) if the condition holds, else carry; a loop, so that nothing is copied.

    `zero` is the loop's counter. What a body computes from other things than carry and `zero` XLA
    moves out of the loop, where it runs whether the condition holds or not.
    """
    return lax.fori_loop(0, condition.astype(jnp.int32), body, carry)
