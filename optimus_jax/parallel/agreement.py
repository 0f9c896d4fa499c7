"""Values that all processes of a run must have alike."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def share(value: Any) -> Any:
    """The first process's `value`, in every process; the others' are not looked at."""
    if jax.process_count() == 1:
        return value
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
    padded = np.zeros(size, np.uint8)
    if jax.process_index() == 0:
        padded[:] = data
    return pickle.loads(np.asarray(multihost_utils.broadcast_one_to_all(padded)).tobytes())


def gather(value: Any) -> list[Any]:
    """Every process's `value`, in the order of the processes."""
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(data)))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(data)] = data
    every = multihost_utils.process_allgather(padded)
    return [
        pickle.loads(row[:size].tobytes()) for row, size in zip(every, sizes.tolist(), strict=True)
    ]
