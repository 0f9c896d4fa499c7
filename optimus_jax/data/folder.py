"""Your own pictures: any folder of them with captions; picture_folder.py reads it."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from optimus_jax.data import caption_files, picture_folder
from optimus_jax.data.variation import placed, varied

SPLITS = ("train", "heldout")
SIDE = 128  # pictures are kept in memory with at most this many pixels a side, or the canvas's
SIDED = re.compile(r"\b(left|right)\b", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Folder:
    """Pictures of `folder` as a data set (sources.Source). With `mirror`, train pictures are
    mirrored half of the time, unless their caption says left or right. `side`: of pictures in
    memory, in pixels. `characters`: of a caption at most, 0 for any number."""

    folder: str
    mirror: bool = False
    side: int = SIDE
    characters: int = 0
    channels: ClassVar[int] = 3
    light_on_dark: ClassVar[bool] = False
    score: ClassVar[str] = "both"
    unused: ClassVar[tuple[str, ...]] = ("digits_low", "digits_high")
    contents: ClassVar[str] = "pictures and their captions"
    smallest: ClassVar[tuple[int, int]] = (8, 8)
    longest: ClassVar[int] = 1  # only the files tell

    @classmethod
    def of(cls, settings: Any) -> Folder:
        return cls(settings.folder, settings.mirror)

    def errors(self) -> Iterator[str]:
        if not self.folder:
            yield (
                "data.folder: the data set 'folder' is a folder of your own, which"
                f" --config.data.folder=PATH must name; {caption_files.FORMS}"
            )

    def fitted(self, canvas: tuple[int, int], characters: int) -> Folder:
        side, characters = max(SIDE, *canvas), max(1, characters)
        return dataclasses.replace(self, side=side, characters=characters)

    def load(self, split: str) -> int | None:
        """Loads a split: train pictures are drawn anew for ever, held-out ones come in order."""
        pictures = self._pictures(split)
        if self.characters:
            self._captions()
        return None if split == "train" else len(pictures)

    def digest(self) -> str:
        pictures = picture_folder.read(self._place, self.side)
        facts = sorted((picture.hash, picture.caption) for picture in pictures)
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def example(
        self, split: str, index: int, rng: np.random.Generator, canvas: tuple[int, int]
    ) -> tuple[np.ndarray, str]:
        """A random train picture, changed a little, or held-out picture `index` as large as it
        fits."""
        pictures = self._pictures(split)
        train = split == "train"
        chosen = pictures[int(rng.integers(len(pictures))) if train else index % len(pictures)]
        caption = self._captions()[chosen.name] if self.characters else chosen.caption
        if not train:
            return placed(chosen.picture, canvas), caption
        may_flip = self.mirror and not SIDED.search(chosen.caption)
        return varied(chosen.picture, rng, canvas, may_flip), caption

    def _pictures(self, split: str) -> tuple[picture_folder.Picture, ...]:
        if split not in SPLITS:
            raise ValueError(
                f"split {split!r} does not exist; valid splits are {', '.join(SPLITS)}"
            )
        return picture_folder.split(self._place, self.side, split)

    def _captions(self) -> dict[str, str]:
        return picture_folder.fitted(self._place, self.side, self.characters)

    @property
    def _place(self) -> pathlib.Path:
        # shells leave a ~ alone that comes after the equals sign of an option
        return pathlib.Path(os.path.expanduser(self.folder)).absolute()
