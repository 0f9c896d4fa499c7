"""The data sets by name, and what a data set is to the rest of the program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Protocol

import numpy as np

from optimus_jax.data.digits import Digits
from optimus_jax.data.fashion import Fashion
from optimus_jax.data.folder import Folder
from optimus_jax.data.stamps import Stamps


class Source(Protocol):
    """A data set with its settings; small when pickled, since its pictures are loaded by `load`.

    channels: of its pictures. light_on_dark: whether they show light things on a dark ground.
    score: what its readings are judged by, a key of evaluate.SCORES. unused: settings of
    DataConfig that mean nothing for it.
    """

    channels: ClassVar[int]
    light_on_dark: ClassVar[bool]
    score: ClassVar[str]
    unused: ClassVar[tuple[str, ...]]

    def errors(self) -> Iterator[str]:
        """What is wrong with its settings, each in the form "data.key: ..."."""
        ...

    @property
    def contents(self) -> str:
        """What a picture or a caption must have room for, in a few words, in the plural."""
        ...

    @property
    def smallest(self) -> tuple[int, int]:
        """Height and width in pixels of the smallest picture that it can make."""
        ...

    @property
    def longest(self) -> int:
        """Characters of the longest caption; the least that would do where only the files tell, and
        then `load` refuses what does not fit."""
        ...

    def fitted(self, canvas: tuple[int, int], characters: int) -> Source:
        """The same, for pictures of that height and width and captions of at most so many
        characters: itself where settings alone say how large both are."""
        ...

    def load(self, split: str) -> int | None:
        """Gets the examples of `split` ready and returns how many there are, None if they never
        repeat. Raises ValueError for an unknown split, UserError where the data is missing or
        does not fit."""
        ...

    def digest(self) -> str:
        """Changes with the pictures and captions of its files, though not with where they lie; ""
        where there are no files. Raises as `load` does."""
        ...

    def example(
        self, split: str, index: int, rng: np.random.Generator, canvas: tuple[int, int]
    ) -> tuple[np.ndarray, str]:
        """A picture uint8 [height, width, channels] of the canvas's size and its caption. The same
        for the same index and generator; `load` has been called, though perhaps elsewhere."""
        ...


SOURCES: dict[str, Any] = {
    "digits": Digits,
    "fashion": Fashion,
    "folder": Folder,
    "stamps": Stamps,
}


def make(settings: Any) -> Source:
    """The data set that a DataConfig names; KeyError if there is none of that name."""
    source: Source = SOURCES[settings.name].of(settings)
    return source
