"""Values that all processes of a run must have alike."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from optimus_jax.errors import UserError

T = TypeVar("T")
SHOWN = 5  # numbers of processes that errors give


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


def loaded_alike(load: Callable[[], tuple[T, str]], what: str) -> tuple[T, str]:
    """What `load` returns: a value of this process's own, and a digest that all must have alike.

    Raises UserError in every process, so that none waits for another, if `load` raises in any (in
    those where it does not raise UserError, what it raises) or if digests of `what` differ.
    """
    value: T | None = None
    digest, words = "", ""
    failed: Exception | None = None
    try:
        value, digest = load()
    except Exception as error:  # any, or else the others would wait for ever
        failed = error
        words = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    every = gather((words, digest))
    if failed and (not isinstance(failed, UserError) or len(set(every)) == 1):
        raise failed
    if any(words for words, _ in every):
        raise UserError(
            "\n".join(
                f"{_processes(every, fact)}: {fact[0]}" for fact in dict.fromkeys(every) if fact[0]
            )
        )
    if len(set(every)) > 1:
        unlike = " unlike ".join(_processes(every, fact) for fact in dict.fromkeys(every))
        raise UserError(f"processes have different {what}, {unlike}: give all of them the same")
    assert value is not None
    return value, digest


def _processes(every: list[T], fact: T) -> str:
    """Those that have `fact`, in words."""
    ranks = [str(rank) for rank, own in enumerate(every) if own == fact]
    more = f", ... ({len(ranks)} of them)" if len(ranks) > SHOWN else ""
    return f"process{'es' * (len(ranks) > 1)} {', '.join(ranks[:SHOWN])}{more}"
