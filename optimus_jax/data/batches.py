"""Examples by index, batches by step, and their computation a few steps ahead."""

from __future__ import annotations

import collections
import dataclasses
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import grain
import numpy as np

from optimus_jax.data import tokens
from optimus_jax.data.sources import Source

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class _Example:
    # the source and the name of the split, no arrays: what goes to another process pickles small
    source: Source
    split: str
    seed: int
    canvas: tuple[int, int]
    image_tokens: int
    length: int
    hide_text: float

    def __call__(self, index: int) -> dict[str, Any]:
        index = int(index)
        rng = np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(index,)))
        image, caption = self.source.example(self.split, index, rng, self.canvas)
        sequence = tokens.sequence(caption, self.image_tokens, self.length)
        if self.hide_text > 0:
            first = self.image_tokens + 1  # the caption's first character, after BOS
            text = sequence["tokens"][first : first + len(caption)]
            text[rng.random(len(caption)) < rng.uniform(0, self.hide_text)] = tokens.PAD
        return {"image": image, **sequence, "caption": caption}


def examples(
    source: Source,
    split: str,
    seed: int,
    canvas: tuple[int, int],
    image_tokens: int,
    length: int,
    hide_text: float = 0.0,
) -> grain.MapDataset:
    """Endless examples, each a pure function of (seed, index): `image` uint8 [height, width, C],
    `tokens`, `targets` and `weights` [length], `caption` str. A share of up to `hide_text` of the
    caption is PAD in `tokens`, though not in `targets`.

    Raises ValueError if one might not fit, UserError if the data is missing or does not fit.
    """
    source = source.fitted(canvas, length - image_tokens - 2)  # without start and end
    source.load(split)  # now, so that threads that compute examples do not race to load it
    if seed < 0:
        raise ValueError(f"seed is {seed}; it must be at least 0")
    if canvas[0] < source.smallest[0] or canvas[1] < source.smallest[1]:
        raise ValueError(
            f"{source.contents} do not fit in a canvas of {canvas[0]} x {canvas[1]} pixels; the"
            f" smallest that would do is {source.smallest[0]} x {source.smallest[1]}"
        )
    # the longest caption must fit now, not at the first step that happens to draw one
    tokens.sequence("0" * source.longest, image_tokens, length)
    # the index travels as the element, so slicing or shuffling the dataset leaves examples alone
    return grain.MapDataset.range(sys.maxsize).map(
        _Example(source, split, seed, canvas, image_tokens, length, hide_text)
    )


@dataclasses.dataclass(frozen=True)
class Batches:
    """Batches of a dataset by step: row r of step s is example s * batch_size + r, in whatever
    process it is computed; ValueError if batch_size is below 1."""

    dataset: grain.MapDataset
    batch_size: int

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; it must be at least 1")

    def rows(self, step: int, rows: Sequence[int]) -> dict[str, np.ndarray]:
        """The given rows of the batch of `step`, stacked: each array [len(rows), ...], without the
        captions; ValueError for no rows, a row outside the batch or a negative step."""
        if len(rows) == 0:
            raise ValueError(f"rows is empty; name at least one of 0 to {self.batch_size - 1}")
        examples = [self._example(step, row) for row in rows]
        names = [name for name in examples[0] if name != "caption"]
        return {name: np.stack([example[name] for example in examples]) for name in names}

    def captions(self, step: int) -> list[str]:
        """The captions of all batch_size rows of `step`; ValueError for a negative step."""
        return [self._example(step, row)["caption"] for row in range(self.batch_size)]

    def _example(self, step: int, row: int) -> dict[str, Any]:
        if step < 0:
            raise ValueError(f"step is {step}; it must be at least 0")
        if not 0 <= row < self.batch_size:
            raise ValueError(
                f"row {row} is outside the batch of {self.batch_size}; "
                f"valid rows are 0 to {self.batch_size - 1}"
            )
        return self.dataset[int(step) * self.batch_size + int(row)]


class Prefetch(Generic[T]):
    """Computes function(first_step), function(first_step + 1), ... in a background thread, at most
    `depth` values ahead of `get`; ValueError if depth is below 1."""

    def __init__(self, function: Callable[[int], T], first_step: int, depth: int) -> None:
        if depth < 1:
            raise ValueError(f"depth is {depth}; it must be at least 1")
        self._function = function
        self._depth = depth
        self._next = first_step
        self._ready: collections.deque[T] = collections.deque()
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(
            target=self._run, args=(first_step,), name="prefetch", daemon=True
        )
        self._thread.start()

    def get(self, step: int) -> T:
        """The value of `step`, waiting for it; re-raises what the function raised there, ValueError
        if `step` is not the one after the last, RuntimeError once closed."""
        with self._changed:
            if step != self._next:
                raise ValueError(f"step {step} was asked for, but the next step is {self._next}")
            self._changed.wait_for(lambda: self._closed or self._ready or self._error is not None)
            if self._closed:
                raise RuntimeError(f"step {step} was asked for, but the prefetch is closed")
            if self._error is not None and not self._ready:
                raise self._error
            self._next += 1
            self._changed.notify_all()
            return self._ready.popleft()

    def close(self) -> None:
        """Ends the thread, after the value it is computing; closing again does nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._ready.clear()

    def _run(self, step: int) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(self._ready) < self._depth)
                if self._closed:
                    return
            try:
                value = self._function(step)
            except BaseException as error:  # any, or else get would wait for ever
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._ready.append(value)
                self._changed.notify_all()
            step += 1
