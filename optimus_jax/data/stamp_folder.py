"""A folder of captioned stamps, as Tux Paint has them, read into memory and split.

Beside each picture NAME.png stands NAME.txt, whose first line is the caption in English, and
perhaps NAME.dat with words such as "nomirror".
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import pathlib
import re

import numpy as np

from optimus_jax.data.captions import plain, shortened
from optimus_jax.errors import UserError

LONGEST = 40  # characters; longer captions explain and are left out
SIDE = 96  # stamps are kept in memory with their longer side at most this many pixels
HELDOUT_EVERY = 5
NEAR = 0.95  # correlation of brightness from which two stamps count as one drawing
# parts of a name that tell variants of one drawing apart
VARIANT = re.compile(r"([-_ ]?(mirror|flip|filled|outline|left|right)|[-_ ]?\d+)$")


@dataclasses.dataclass(frozen=True, eq=False)
class Stamp:
    """`name`: its path in the folder, without ending. `picture`: uint8 [h, w, 3] on white, cut to
    what is drawn. `may_flip`: whether its mirror image shows the same."""

    name: str
    caption: str
    picture: np.ndarray
    may_flip: bool


@functools.cache
def read(folder: pathlib.Path) -> tuple[Stamp, ...]:
    """All stamps with a caption of up to LONGEST characters (or a first sentence of that length),
    by name; UserError if a picture cannot be read."""
    stamps = []
    for path in sorted(folder.rglob("*.png")):
        text, facts = path.with_suffix(".txt"), path.with_suffix(".dat")
        if not text.is_file():
            continue  # a second picture of another stamp
        lines = text.read_text("utf-8", errors="replace").splitlines()
        caption = shortened(plain(lines[0]), LONGEST) if lines else None
        if not caption:
            continue
        sided = facts.is_file() and "nomirror" in facts.read_text("utf-8", errors="replace")
        sided = sided or path.with_name(f"{path.stem}_mirror.png").exists()
        sided = sided or bool(re.search(r"\b(left|right)\b", caption.lower()))
        name = path.relative_to(folder).with_suffix("").as_posix()
        stamps.append(Stamp(name, caption, _picture(path), not sided))
    return tuple(stamps)


def _picture(path: pathlib.Path) -> np.ndarray:
    """The visible part of a picture, on white, uint8 [h, w, 3], each side at most SIDE."""
    from PIL import Image

    try:
        with Image.open(path) as opened:
            rgba = opened.convert("RGBA")
    except (OSError, ValueError, SyntaxError) as error:
        raise UserError(f"{path} cannot be read ({error}): get the data anew") from None
    rgba = rgba.crop(rgba.getchannel("A").getbbox())  # all of it where nothing is visible
    rgba.thumbnail((SIDE, SIDE), Image.Resampling.BOX)
    ground = Image.new("RGBA", rgba.size, "white")
    picture = np.array(Image.alpha_composite(ground, rgba).convert("RGB"))
    picture.setflags(write=False)
    return picture


@functools.cache
def split(folder: pathlib.Path, which: str) -> tuple[Stamp, ...]:
    """The stamps of a split, `train` or `heldout`, in an order that mixes the folders.

    A group goes to one side as a whole, to held-out if the hash of its first name is divisible by
    HELDOUT_EVERY: stable from run to run, and whatever happens to other stamps.
    """
    chosen = []
    for group in groups(read(folder)):
        heldout = _hash(group[0].name) % HELDOUT_EVERY == 0
        chosen += group if heldout == (which == "heldout") else []
    return tuple(sorted(chosen, key=lambda stamp: _hash(stamp.name)))


def groups(stamps: tuple[Stamp, ...]) -> list[list[Stamp]]:
    """The stamps, variants of one drawing together: those whose file names differ only in size of
    letters and in VARIANT, and those that look nearly the same, or the same when mirrored."""
    parent = list(range(len(stamps)))

    def root(k: int) -> int:
        while parent[k] != k:
            k = parent[k]
        return k

    first: dict[str, int] = {}
    pairs = [(first.setdefault(subject(s.name), k), k) for k, s in enumerate(stamps)]
    pairs += near_copies([s.picture for s in stamps])
    for a, b in pairs:
        low, high = sorted((root(a), root(b)))
        parent[high] = low
    found: dict[int, list[Stamp]] = {}
    for k, stamp in enumerate(stamps):
        found.setdefault(root(k), []).append(stamp)
    return list(found.values())


def subject(name: str) -> str:
    """A stamp's file name without what tells variants apart: animals/fly-2 and seasonal/fly_mirror
    are both "fly"; all of it if nothing would be left."""
    stem = whole = name.rpartition("/")[2].lower()
    while (shorter := VARIANT.sub("", stem)) != stem:
        stem = shorter
    return stem or whole


def near_copies(pictures: list[np.ndarray]) -> list[tuple[int, int]]:
    """Pairs (low, high) of pictures whose brightness, on 16 x 16 pixels, correlates by NEAR."""
    from PIL import Image

    small = np.zeros((len(pictures), 16, 16))
    for k, picture in enumerate(pictures):
        grey = Image.fromarray(picture).convert("L")
        small[k] = np.asarray(grey.resize((16, 16), Image.Resampling.BOX))

    def normalised(x: np.ndarray) -> np.ndarray:
        x = x.reshape(len(x), -1)
        x = x - x.mean(1, keepdims=True)
        return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-9)

    straight, mirrored = normalised(small), normalised(small[:, :, ::-1])
    alike = np.maximum(straight @ straight.T, straight @ mirrored.T) > NEAR
    return [(int(a), int(b)) for a, b in zip(*np.nonzero(np.triu(alike, 1)), strict=True)]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
