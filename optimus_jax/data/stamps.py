"""Captioned stamps: small coloured pictures of animals, things and signs, "A great blue heron."

From the Debian package tuxpaint-stamps-default; stamp_folder.py reads them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from optimus_jax.data import stamp_folder
from optimus_jax.data.folders import find
from optimus_jax.data.stamp_folder import Stamp
from optimus_jax.errors import UserError

INSTALLED = "/usr/share/tuxpaint/stamps"
SPLITS = ("train", "heldout")
SMALLEST = 0.7  # train pictures are scaled by this to 1, times the scale at which they just fit
STRETCH = 0.1  # and their proportions changed by up to this share
COLOUR = 0.2  # and each colour of the ink weakened or strengthened by up to this share


@dataclasses.dataclass(frozen=True)
class Stamps:
    """Stamps as a data set (sources.Source). An empty `folder` means the usual places."""

    folder: str = ""
    channels: ClassVar[int] = 3
    light_on_dark: ClassVar[bool] = False
    score: ClassVar[str] = "loss"
    unused: ClassVar[tuple[str, ...]] = ("digits_low", "digits_high")
    contents: ClassVar[str] = "stamps and their captions"
    smallest: ClassVar[tuple[int, int]] = (8, 8)
    longest: ClassVar[int] = stamp_folder.LONGEST

    @classmethod
    def of(cls, settings: Any) -> Stamps:
        return cls(settings.folder)

    def errors(self) -> Iterator[str]:
        yield from ()

    def load(self, split: str) -> int | None:
        """Loads a split: train stamps are drawn anew for ever, held-out ones come in order."""
        stamps = load(split, self.folder)
        return None if split == "train" else len(stamps)

    def example(
        self, split: str, index: int, rng: np.random.Generator, canvas: tuple[int, int]
    ) -> tuple[np.ndarray, str]:
        """A random train stamp, changed a little, or held-out stamp `index` as large as it fits."""
        stamps = load(split, self.folder)
        if split == "train":
            stamp = stamps[int(rng.integers(len(stamps)))]
            return varied(stamp, rng, canvas), stamp.caption
        stamp = stamps[index % len(stamps)]
        return placed(stamp.picture, canvas, (1.0, 1.0), (0.5, 0.5)), stamp.caption


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


def varied(stamp: Stamp, rng: np.random.Generator, canvas: tuple[int, int]) -> np.ndarray:
    """The stamp on a white canvas, uint8 [height, width, 3]: smaller, stretched, elsewhere, in
    other shades, and mirrored where that shows the same."""
    picture = stamp.picture
    if rng.random() < 0.5 and stamp.may_flip:
        picture = picture[:, ::-1]
    scale = rng.uniform(SMALLEST, 1)
    # 1 is the largest that fits, so one side is shortened rather than the other one lengthened
    shorter = 1 - rng.uniform(0, STRETCH)
    scales = (scale * shorter, scale) if rng.random() < 0.5 else (scale, scale * shorter)
    image = placed(picture, canvas, scales, tuple(rng.random(2)))
    ink = (255.0 - image) * rng.uniform(1 - COLOUR, 1 + COLOUR, 3)  # white stays white
    return np.rint(255 - np.minimum(ink, 255)).astype(np.uint8)


def placed(
    picture: np.ndarray,
    canvas: tuple[int, int],
    scales: tuple[float, float],
    place: tuple[float, ...],
) -> np.ndarray:
    """A picture uint8 [h, w, 3] on a white canvas [height, width, 3]: as large as it fits with its
    proportions kept, times `scales` (of height and width, at most 1); `place` is the share of the
    free room that is left above and to the left of it."""
    from PIL import Image

    height, width, _ = picture.shape
    fit = min(canvas[0] / height, canvas[1] / width)
    size = [max(1, round(n * fit * s)) for n, s in zip((height, width), scales, strict=True)]
    scaled = Image.fromarray(picture).resize((size[1], size[0]), Image.Resampling.BILINEAR)
    top, left = (
        round((room - taken) * share)
        for room, taken, share in zip(canvas, size, place, strict=True)
    )
    image = np.full((*canvas, 3), 255, np.uint8)
    image[top : top + size[0], left : left + size[1]] = np.asarray(scaled)
    return image
