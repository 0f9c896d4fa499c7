"""Captioned stamps: small coloured pictures of animals, things and signs, "A great blue heron."

From the Debian package tuxpaint-stamps-default; stamp_folder.py reads them.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from optimus_jax.data import stamp_folder
from optimus_jax.data.folders import find
from optimus_jax.data.stamp_folder import Stamp
from optimus_jax.data.variation import placed, varied
from optimus_jax.errors import UserError

INSTALLED = "/usr/share/tuxpaint/stamps"
SPLITS = ("train", "heldout")


@dataclasses.dataclass(frozen=True)
class Stamps:
    """Stamps as a data set (sources.Source). An empty `folder` means the usual places."""

    folder: str = ""
    channels: ClassVar[int] = 3
    light_on_dark: ClassVar[bool] = False
    score: ClassVar[str] = "loss"
    unused: ClassVar[tuple[str, ...]] = ("digits_low", "digits_high", "mirror")
    contents: ClassVar[str] = "stamps and their captions"
    smallest: ClassVar[tuple[int, int]] = (8, 8)
    longest: ClassVar[int] = stamp_folder.LONGEST

    @classmethod
    def of(cls, settings: Any) -> Stamps:
        return cls(settings.folder)

    def errors(self) -> Iterator[str]:
        yield from ()

    def fitted(self, canvas: tuple[int, int], characters: int) -> Stamps:
        return self

    def load(self, split: str) -> int | None:
        """Loads a split: train stamps are drawn anew for ever, held-out ones come in order."""
        stamps = load(split, self.folder)
        return None if split == "train" else len(stamps)

    def digest(self) -> str:
        stamps = load("train", self.folder)
        return hashlib.sha256(repr([(s.name, s.caption) for s in stamps]).encode()).hexdigest()

    def example(
        self, split: str, index: int, rng: np.random.Generator, canvas: tuple[int, int]
    ) -> tuple[np.ndarray, str]:
        """A random train stamp, changed a little, or held-out stamp `index` as large as it fits."""
        stamps = load(split, self.folder)
        if split == "train":
            stamp = stamps[int(rng.integers(len(stamps)))]
            return varied(stamp.picture, rng, canvas, stamp.may_flip), stamp.caption
        stamp = stamps[index % len(stamps)]
        return placed(stamp.picture, canvas), stamp.caption


@functools.cache
def load(split: str, folder: str) -> tuple[Stamp, ...]:
    """The stamps of `split`, decoded once; ValueError if it is not train or heldout, UserError if
    there are none."""
    if split not in SPLITS:
        raise ValueError(f"split {split!r} does not exist; valid splits are {', '.join(SPLITS)}")
    place = find("stamps", folder, INSTALLED, "**/*.png")
    stamps = stamp_folder.split(place.absolute(), split)
    if not stamps:
        raise UserError(f"{place} has too few stamps: none is left for the {split} split")
    return stamps
