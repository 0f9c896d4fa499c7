"""Bytes counted in traced programs against counts by hand, in matrices of 64 x 64 floats."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from optimus_jax.runtime.liveness import array_bytes, moments

MATRIX = 64 * 64 * 4


def most(function: Any, *dtypes: Any, emulated: bool = False) -> float:
    """Matrices held at once, to a tenth: loop counters and single rows do not count."""
    inputs = [jax.ShapeDtypeStruct((64, 64), dtype) for dtype in dtypes or (jnp.float32,) * 2]
    jaxpr = jax.make_jaxpr(function)(*inputs).jaxpr
    return round(max(m.total for m in moments(jaxpr, emulated)) / MATRIX, 1)


def trips(x: jax.Array) -> jax.Array:
    """A number of trips that the trace does not know, as a tick's tasks have; the loops of the
    other tests are scans."""
    return x[0, 0].astype(jnp.int32)


def test_a_value_is_held_until_it_is_read_for_the_last_time() -> None:
    def chain(x, w):
        return ((x @ w) @ w) @ w

    def residual(x, w):
        first = x @ w
        return ((first @ w) @ w) @ first

    assert most(chain) == 2
    assert most(residual) == 3


def test_elementwise_work_has_no_memory_unless_a_product_reads_it() -> None:
    assert most(lambda x, w: (x + w) * 2 - w) == 0
    assert most(lambda x, w: ((x + w) * 2 - w) @ w) == 1


def test_what_fused_work_reads_waits_for_it() -> None:
    def late(x, w):
        shifted = x @ w + w  # computed in the last line, from a product that waits until then
        return shifted + (w @ w) @ w

    assert most(late) == 3


def test_costly_values_are_not_computed_twice() -> None:
    assert most(lambda x, w: jnp.exp(x) + w) == 0

    def twice(x, w):
        y = jnp.exp(x)
        return y * w + y

    assert most(twice) == 1


def test_what_nobody_reads_is_not_counted() -> None:
    def dead(x, w):
        _ = (x @ w) @ w
        return x + w

    assert most(dead) == 0


def test_a_loop_updates_what_it_carries_in_place() -> None:
    def rows(x, w):
        def body(i, c):
            row = (c[i][None] @ w)[0]
            return lax.dynamic_update_slice(c, row[None], (i, 0))

        return lax.fori_loop(0, trips(w), body, jnp.zeros_like(x)) @ w

    assert most(rows) == 1  # the zeros, made for the loop; what it returns lies in the same place


def test_a_carried_value_computed_anew_takes_memory_twice() -> None:
    def powers(x, w):
        return lax.fori_loop(0, trips(w), lambda i, y: y @ w, x)

    def sums(x, w):
        return lax.fori_loop(0, 3, lambda i, y: y + w, x)

    assert most(powers) == 1
    assert most(sums) == 0


def test_a_body_counts_while_its_loop_runs() -> None:
    def loop(x, w):
        held = x @ w
        y = lax.fori_loop(0, 3, lambda i, y: y + (w @ w) @ w, x)
        return y @ held

    # the value around the loop, and both products of the body
    assert most(loop) == 3


@pytest.mark.parametrize(("emulated", "factor"), [(False, 1), (True, 2)])
def test_emulated_bfloat16_is_held_in_float32(emulated: bool, factor: int) -> None:
    def chain(x, w):
        return ((x @ w) @ w) @ w

    halves = jnp.bfloat16, jnp.bfloat16
    assert most(chain, *halves, emulated=emulated) == factor


def test_arrays_start_at_multiples_of_64_bytes() -> None:
    assert array_bytes(jax.ShapeDtypeStruct((17,), jnp.float32)) == 128
