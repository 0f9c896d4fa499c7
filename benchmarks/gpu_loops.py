"""What a tick's loops of zero or one trips cost: the host reads each trip count from the device.

The executor's tick is a row of such loops, one for each kind of task and of exchange. Here is the
same shape with nothing in it: a scan over ticks whose rows say which loops run, with loops that add
to a small carry. The rows are inputs, so XLA knows no trip count; the scan's own it knows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optimus_jax.measure.rounds import by_turns

Step = Callable[[jax.Array, jax.Array], jax.Array]
WIDTH = 1024


def loops(count: int) -> Step:
    """Runs a table [ticks, WIDTH] with `count` loops in each tick, over a carry [WIDTH]."""

    def tick(x: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
        x = x + row
        for k in range(count):
            # the body reads the counter, or XLA would move it out of its loop
            x = lax.fori_loop(0, row[k], lambda zero, x, k=k: x + row[zero + k], x)
        return x, None

    return jax.jit(lambda x, table: lax.scan(tick, x, table)[0])


def switch() -> Step:
    """The same with one switch of three branches instead, as one over patterns of exchanges."""
    branches = [lambda x, k=k: x + k for k in range(3)]

    def tick(x: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
        return lax.switch(row[0], branches, x + row), None

    return jax.jit(lambda x, table: lax.scan(tick, x, table)[0])


def measure(ticks: int, counts: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    """Seconds of a tick for each number of loops, idle or all running, and for the switch; each
    less those of the scan alone within the same round."""
    x, idle = jnp.zeros(WIDTH, jnp.int32), np.zeros((ticks, WIDTH), np.int32)
    tables = {"no trip": jnp.asarray(idle), "one trip": jnp.asarray(idle + 1)}
    chosen = {("scan alone", 0, "no trip"): loops(0), ("switch", 0, "one trip"): switch()}
    for count in counts:
        step = loops(count)
        chosen |= {("loops", count, trips): step for trips in tables}

    def timed(step: Step, table: jax.Array) -> Callable[[], float]:
        def seconds() -> float:
            start = time.perf_counter()
            step(x, table).block_until_ready()
            return time.perf_counter() - start

        return seconds

    runs = {str(key): timed(step, tables[key[2]]) for key, step in chosen.items()}
    times = by_turns(runs, rounds)
    base = times[str(("scan alone", 0, "no trip"))]
    return [
        {
            "what": what,
            "loops": count,
            "trips": trips,
            "ticks": ticks,
            "tick_s": [s / ticks for s in times[str((what, count, trips))]],
            "beyond_scan_s": [
                (s - b) / ticks for s, b in zip(times[str((what, count, trips))], base, strict=True)
            ],
        }
        for what, count, trips in chosen
    ]
