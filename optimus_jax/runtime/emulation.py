"""Emulated tasks: each sleeps as long as it would take, so many stages need no cores of their own.

Exchanges, ticks, gradient reduction and optimiser stay what they are. Loss and gradients mean
nothing.
"""

from __future__ import annotations

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optimus_jax.parallel.mesh import Axes
from optimus_jax.runtime.carry import Carry, Row
from optimus_jax.schedule.program import task_of
from optimus_jax.schedule.simulate import Durations
from optimus_jax.schedule.task import Pipeline


class Sleeps:
    """Stands for `LlmTasks` and `EncoderTasks`: the same methods, each a sleep. `pipe_axes` are
    those of the LLM's stages."""

    def __init__(self, durations: Durations, pipe: Pipeline, pipe_axes: Axes):
        self.durations, self.pipe, self.pipe_axes = durations, pipe, pipe_axes

    def forward(self, c: Carry, row: Row) -> Carry:
        """Any task: the row says which, and `durations` how long it takes on this device."""
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        # one argument: each costs time to hand over
        which = jnp.concatenate([row.table, jnp.stack([lax.axis_index(self.pipe_axes), c.nans])])
        return c.after(jax.pure_callback(self._sleep, shape, which))

    backward = forward

    def _sleep(self, which: jax.Array) -> np.float32:
        end = time.perf_counter()
        *row, device, _ = np.asarray(which).tolist()
        end += self._seconds(tuple(row), device)
        while (left := end - time.perf_counter()) > 0:
            time.sleep(left)
        return np.float32(0)

    @functools.cache  # noqa: B019 (lives as long as the compiled step)
    def _seconds(self, row: tuple[int, ...], device: int) -> float:
        task = task_of(np.array(row), self.pipe, device)
        assert task is not None, "only rows with a task run"
        return self.durations.of(task, device, self.pipe)
