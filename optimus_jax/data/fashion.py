"""Fashion-MNIST: grey pictures of garments, captioned with what they show.

Read from the gzipped IDX files of the Debian package dataset-fashion-mnist.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import pathlib
import zlib
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from optimus_jax.data.folders import find
from optimus_jax.errors import UserError

SIDE = 28  # height and width of a picture in pixels
GARMENTS = (  # by label
    "a t-shirt",
    "trousers",
    "a pullover",
    "a dress",
    "a coat",
    "a sandal",
    "a shirt",
    "a sneaker",
    "a bag",
    "an ankle boot",
)
CAPTIONS = tuple(f"a photo of {garment}" for garment in GARMENTS)
INSTALLED = "/usr/share/datasets/fashion-mnist"
FILES = {"train": "train", "heldout": "t10k"}  # the official test pictures are held out


@dataclasses.dataclass(frozen=True, eq=False)
class Pool:
    """`images` uint8 [N, 28, 28], light on dark, and their `labels` int64 [N]."""

    images: np.ndarray
    labels: np.ndarray


@dataclasses.dataclass(frozen=True)
class Fashion:
    """Garments as a data set (sources.Source). An empty `folder` means the usual places."""

    folder: str = ""
    channels: ClassVar[int] = 1
    light_on_dark: ClassVar[bool] = True
    score: ClassVar[str] = "captions"
    unused: ClassVar[tuple[str, ...]] = ("digits_low", "digits_high", "mirror")
    contents: ClassVar[str] = "pictures of garments"
    smallest: ClassVar[tuple[int, int]] = (SIDE, SIDE)
    longest: ClassVar[int] = max(map(len, CAPTIONS))

    @classmethod
    def of(cls, settings: Any) -> Fashion:
        return cls(settings.folder)

    def errors(self) -> Iterator[str]:
        yield from ()

    def fitted(self, canvas: tuple[int, int], characters: int) -> Fashion:
        return self

    def load(self, split: str) -> int | None:
        """Loads a split: train pictures are drawn anew for ever, held-out ones come in order."""
        pool = load(split, self.folder)
        return None if split == "train" else len(pool.labels)

    def digest(self) -> str:
        pool = load("train", self.folder)
        return hashlib.sha256(pool.images.tobytes() + pool.labels.tobytes()).hexdigest()

    def example(
        self, split: str, index: int, rng: np.random.Generator, canvas: tuple[int, int]
    ) -> tuple[np.ndarray, str]:
        """A random train picture, or held-out picture `index`, in the middle of a dark canvas."""
        pool = load(split, self.folder)
        count = len(pool.labels)
        chosen = int(rng.integers(count)) if split == "train" else index % count
        image = np.zeros((*canvas, 1), np.uint8)
        top, left = (canvas[0] - SIDE) // 2, (canvas[1] - SIDE) // 2
        image[top : top + SIDE, left : left + SIDE, 0] = pool.images[chosen]
        return image, CAPTIONS[pool.labels[chosen]]


@functools.cache
def load(split: str, folder: str) -> Pool:
    """The pictures of `split`, read once; ValueError if it is not train or heldout, UserError if
    the files are missing or damaged."""
    if split not in FILES:
        raise ValueError(f"split {split!r} does not exist; valid splits are {', '.join(FILES)}")
    prefix = FILES[split]
    images, labels = f"{prefix}-images-idx3-ubyte.gz", f"{prefix}-labels-idx1-ubyte.gz"
    place = find("fashion", folder, INSTALLED, images)
    pool = Pool(read_idx(place / images, 3), read_idx(place / labels, 1).astype(np.int64))
    if pool.images.shape != (len(pool.labels), SIDE, SIDE) or not len(pool.labels):
        raise UserError(
            f"{place} is not Fashion-MNIST: {images} has pictures {list(pool.images.shape)},"
            f" {labels} {len(pool.labels)} labels"
        )
    if pool.labels.max() >= len(GARMENTS):
        raise UserError(f"{place / labels}: label {pool.labels.max()} is above 9")
    for array in (pool.images, pool.labels):
        array.setflags(write=False)  # every caller gets the same arrays
    return pool


def read_idx(path: pathlib.Path, axes: int) -> np.ndarray:
    """The bytes of a gzipped IDX file as an array uint8 of `axes` axes; UserError if it is not one.

    An IDX file is 0, 0, the type (8: unsigned bytes), the number of axes, the length of each as a
    big-endian int32, then the values.
    """
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({error}): get the data anew") from None
    start = 4 + 4 * axes
    shape = np.frombuffer(content[4:start], ">i4") if len(content) >= start else np.zeros(1)
    right = content[:4] == bytes([0, 0, 8, axes]) and np.all(shape >= 0)
    if not right or int(np.prod(shape, dtype=np.int64)) != len(content) - start:
        raise UserError(f"{path} is not an IDX file of bytes with {axes} axes: get the data anew")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
