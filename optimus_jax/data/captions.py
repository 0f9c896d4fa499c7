"""Captions as people wrote them, brought to the characters of the vocabulary."""

from __future__ import annotations

import unicodedata

from optimus_jax.data.tokens import CHARACTERS

WRITTEN = {
    **dict.fromkeys("“”„«»", '"'),
    **dict.fromkeys("‘’´`", "'"),
    **dict.fromkeys("–−", "-"),
    "—": " - ",
    "€": "euro",
    "£": "pounds",
    "ß": "ss",
    "×": "x",
}


def plain(text: str) -> str:
    """`text` in characters of the vocabulary: letters lose their accents, quotes and dashes become
    those of a typewriter, what has no counterpart is left out; one space at most between words."""
    text = "".join(WRITTEN.get(character, character) for character in text)
    kept = (c for c in unicodedata.normalize("NFKD", text) if c in CHARACTERS or c.isspace())
    return " ".join("".join(kept).split())


def shortened(text: str, longest: int) -> str | None:
    """`text`, or its first sentence where all of it has more than `longest` characters, None where
    that is too long as well."""
    if len(text) <= longest:
        return text
    first = first_sentence(text)
    return first if len(first) <= longest else None


def first_sentence(text: str) -> str:
    """`text` up to the first full stop, exclamation or question mark before a space."""
    ends = [text.find(mark) for mark in (". ", "! ", "? ") if mark in text]
    return text[: min(ends) + 1] if ends else text
