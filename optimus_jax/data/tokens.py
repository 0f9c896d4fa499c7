"""Captions as token ids: a fixed character vocabulary and the layout of a training sequence."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

PAD, BOS, EOS, IMAGE = range(4)  # IMAGE holds the place that an image token is spliced over
CHARACTERS = (
    "0123456789 "  # first, as when there were only digits
    "abcdefghijklmnopqrstuvwxyz"
    "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    ".,:;!?'\"()-/&%$+"
)
FIRST_CHARACTER = IMAGE + 1
SIZE = FIRST_CHARACTER + len(CHARACTERS)

_ID_OF = {character: FIRST_CHARACTER + i for i, character in enumerate(CHARACTERS)}


def encode(text: str) -> list[int]:
    """The ids of the characters of `text`, without BOS and EOS; ValueError for other characters."""
    for position, character in enumerate(text):
        if character not in _ID_OF:
            raise ValueError(
                f"character {character!r} at position {position} of {text!r} is not in the "
                f"vocabulary; valid characters are {CHARACTERS!r}"
            )
    return [_ID_OF[character] for character in text]


def decode(ids: Iterable[int]) -> str:
    """The text of `ids` up to EOS, without PAD, BOS and IMAGE; ValueError for unknown ids."""
    text = ""
    for token in map(int, ids):
        if token == EOS:
            break
        if not 0 <= token < SIZE:
            raise ValueError(
                f"token id {token} is not in the vocabulary; valid ids are 0 to {SIZE - 1}"
            )
        if token >= FIRST_CHARACTER:
            text += CHARACTERS[token - FIRST_CHARACTER]
    return text


def sequence(caption: str, image_tokens: int, length: int) -> dict[str, np.ndarray]:
    """One training sequence: `tokens` and `targets` int32 [length] and `weights` float32 [length],
    1 where the target is a caption character or EOS; ValueError if the caption does not fit.

    The tokens are IMAGE * image_tokens, BOS, the caption, EOS, PAD...
    """
    ids = encode(caption)
    needed = image_tokens + len(ids) + 2
    if needed > length:
        raise ValueError(
            f"caption {caption!r} needs {needed} positions ({image_tokens} image tokens, BOS, "
            f"{len(ids)} characters, EOS) but length is {length}; it must be at least {needed}"
        )
    tokens = prompt(image_tokens, length)
    tokens[image_tokens + 1 : needed] = [*ids, EOS]
    targets = np.append(tokens[1:], np.int32(PAD))
    weights = np.zeros(length, np.float32)
    weights[image_tokens : needed - 1] = 1
    return {"tokens": tokens, "targets": targets, "weights": weights}


def prompt(image_tokens: int, length: int) -> np.ndarray:
    """What generation starts from, int32 [length]: IMAGE * image_tokens, BOS, PAD...; ValueError
    if that does not fit."""
    if image_tokens < 0:
        raise ValueError(f"image_tokens is {image_tokens}; it must be at least 0")
    if image_tokens + 1 > length:
        raise ValueError(
            f"{image_tokens} image tokens and BOS need {image_tokens + 1} positions but length is "
            f"{length}; it must be at least {image_tokens + 1}"
        )
    tokens = np.full(length, PAD, np.int32)
    tokens[:image_tokens] = IMAGE
    tokens[image_tokens] = BOS
    return tokens
