"""When each part of a Program ran, noted by the compiled step itself."""

from __future__ import annotations

import time
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optimus_jax.parallel.mesh import Axes
from optimus_jax.runtime.carry import Carry

MARKS = 3  # a tick's begin, the end of its task, the end of its exchange


class Clock:
    """Notes the time of each mark of each tick, by pipeline stage, in a process that has one device
    of each.

    The times are those of the machine's monotonic clock, which its processes share. Each note costs
    a call into Python, about 0.1 ms: for a step that is looked at, not for one that is timed.
    """

    def __init__(self) -> None:
        self.times: dict[int, list[float]] = defaultdict(list)

    def note(self, c: Carry, pipe: Axes) -> Carry:
        """The carry, once the host has noted the time; runs inside shard_map, where `pipe` are the
        axes of the stages."""
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        which = jnp.stack([lax.axis_index(pipe), c.nans])
        return c.after(jax.pure_callback(self._note, shape, which))

    def _note(self, which: jax.Array) -> np.float32:
        now = time.monotonic()
        self.times[int(np.asarray(which)[0])].append(now)
        return np.float32(0)

    def take(self) -> dict[int, np.ndarray]:
        """By stage, [ticks, MARKS] seconds of one step; forgets them."""
        found = {d: np.array(times).reshape(-1, MARKS) for d, times in self.times.items()}
        self.times.clear()
        return found
