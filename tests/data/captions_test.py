from __future__ import annotations

import pytest

from optimus_jax.data import tokens
from optimus_jax.data.captions import plain, shortened


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ("A frog.", "A frog."),
        ("A “Fuji” apple.", 'A "Fuji" apple.'),
        ("A knight’s helmet.", "A knight's helmet."),
        ("Tux—the Linux mascot!", "Tux - the Linux mascot!"),
        ("  Räuchermännchen, señor…\t", "Rauchermannchen, senor..."),
        ("A coin of 1 euro (1 €).", "A coin of 1 euro (1 euro)."),
        ("A crow ворона.", "A crow ."),
        ("A ворона crow \u200b here", "A crow here"),
        ("ворона", ""),
    ],
)
def test_captions_are_brought_to_the_vocabulary(written: str, wanted: str) -> None:
    assert plain(written) == wanted
    tokens.encode(plain(written))


@pytest.mark.parametrize(
    ("caption", "wanted"),
    [
        ("A dumper.", "A dumper."),
        ("A dumper! It carries its load.", "A dumper!"),
        ("Why? A dumper. It carries its load.", "Why?"),
        ("It is a dumper without an end", None),
        ("It is a dumper of great size. It carries.", None),
    ],
)
def test_long_captions_are_cut_to_a_sentence_or_left_out(caption: str, wanted: str | None) -> None:
    assert shortened(caption, 12) == wanted
