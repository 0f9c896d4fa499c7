"""Pictures of several handwritten digits, captioned by their reading from left to right."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

SIDE = 8  # height and width of one digit in pixels
GRID = 4  # digits stand at multiples of it: half-way positions would take far longer to learn
SPLITS = ("train", "heldout")
HELDOUT_EVERY = 5


@dataclasses.dataclass(frozen=True, eq=False)
class Pool:
    """Digits to compose from: `images` uint8 [N, 8, 8], their `labels` int [N], and `sources`
    int [N], their row numbers in sklearn's data set."""

    images: np.ndarray
    labels: np.ndarray
    sources: np.ndarray


@dataclasses.dataclass(frozen=True)
class Digits:
    """Pictures of `low` to `high` digits as a data set (sources.Source)."""

    low: int
    high: int
    channels: ClassVar[int] = 1
    light_on_dark: ClassVar[bool] = True
    score: ClassVar[str] = "digits"
    # they come with scikit-learn
    unused: ClassVar[tuple[str, ...]] = ("folder", "mirror", "allow_changes")

    @classmethod
    def of(cls, settings: Any) -> Digits:
        return cls(settings.digits_low, settings.digits_high)

    def errors(self) -> Iterator[str]:
        for name, value in (("digits_low", self.low), ("digits_high", self.high)):
            if value <= 0:
                yield f"data.{name}: must be positive, got {value}"
        if self.low > self.high:
            yield f"data: digits_low {self.low} is above digits_high {self.high}"

    @property
    def contents(self) -> str:
        return f"{self.high} digits"

    @property
    def smallest(self) -> tuple[int, int]:
        return SIDE, SIDE * self.high

    @property
    def longest(self) -> int:
        return 2 * self.high - 1  # with spaces between

    def fitted(self, canvas: tuple[int, int], characters: int) -> Digits:
        return self

    def load(self, split: str) -> int | None:
        """Loads a split; every index gives another picture."""
        load(split)
        return None

    def digest(self) -> str:
        return ""

    def example(
        self, split: str, index: int, rng: np.random.Generator, canvas: tuple[int, int]
    ) -> tuple[np.ndarray, str]:
        """A picture of random digits of the split and its reading."""
        return compose(load(split), rng, canvas, (self.low, self.high))


@functools.cache
def load(split: str) -> Pool:
    """The digits of `split`, the same in every run; ValueError if it is not train or heldout.

    Every fifth digit of each class is held out: other pictures, though not other writers.
    """
    if split not in SPLITS:
        raise ValueError(f"split {split!r} does not exist; valid splits are {', '.join(SPLITS)}")
    images, labels = _source()
    occurrence = np.zeros(len(labels), np.int64)
    for label in np.unique(labels):
        of_label = labels == label
        occurrence[of_label] = np.arange(of_label.sum())
    heldout = occurrence % HELDOUT_EVERY == HELDOUT_EVERY - 1
    sources = np.flatnonzero(heldout if split == "heldout" else ~heldout)
    pool = Pool(images[sources], labels[sources], sources)
    for array in (pool.images, pool.labels, pool.sources):
        array.setflags(write=False)  # every caller gets the same arrays
    return pool


@functools.cache
def _source() -> tuple[np.ndarray, np.ndarray]:
    # importing sklearn takes seconds, and most importers of this module never load the digits
    from sklearn.datasets import load_digits

    data = load_digits()
    return np.rint(data.images * (255 / 16)).astype(np.uint8), data.target.astype(np.int64)


def check_fits(canvas: tuple[int, int], count: tuple[int, int]) -> None:
    """Raises ValueError unless 1 <= low <= high = count[1] and `high` digits fit side by side."""
    (height, width), (low, high) = canvas, count
    if not 1 <= low <= high:
        raise ValueError(f"count is ({low}, {high}); it must be (low, high) with 1 <= low <= high")
    if height < SIDE or width < SIDE * high:
        raise ValueError(
            f"{high} digits of {SIDE}x{SIDE} do not fit side by side in a canvas of height "
            f"{height} and width {width}; the smallest canvas that would do is ({SIDE}, "
            f"{SIDE * high})"
        )


def compose(
    digits_pool: Pool,
    rng: np.random.Generator,
    canvas: tuple[int, int],
    count: tuple[int, int],
) -> tuple[np.ndarray, str]:
    """A picture uint8 [height, width, 1] of low to high random digits that do not overlap, and its
    caption, such as "3 1 4"; ValueError if `high` digits do not fit in the canvas."""
    check_fits(canvas, count)
    height, width = canvas
    number = int(rng.integers(count[0], count[1], endpoint=True))
    chosen = rng.integers(len(digits_pool.labels), size=number)
    slack = (width - SIDE * number) // GRID
    shifts = np.sort(rng.integers(slack, size=number, endpoint=True))
    lefts = GRID * shifts + SIDE * np.arange(number)
    tops = GRID * rng.integers((height - SIDE) // GRID, size=number, endpoint=True)
    image = np.zeros((height, width, 1), np.uint8)
    for digit, left, top in zip(chosen, lefts, tops, strict=True):
        image[top : top + SIDE, left : left + SIDE, 0] = digits_pool.images[digit]
    return image, " ".join(str(digits_pool.labels[digit]) for digit in chosen)
