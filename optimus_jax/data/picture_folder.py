"""A folder of pictures with captions, read into memory and split.

What is wrong with its pictures and captions is said at once, in words.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
import os
import pathlib
from collections.abc import Iterator

import numpy as np

from optimus_jax.data import caption_files
from optimus_jax.data.captions import first_sentence, plain, shortened
from optimus_jax.errors import UserError

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
HELDOUT_EVERY = 5
LEAST = 2  # pictures in each split: a caption is compared with that of another
ENOUGH = 40  # pictures of which 1 in HELDOUT_EVERY is LEAST or more, in 998 folders of 1000
SHOWN = 5  # names of a list that errors give


@dataclasses.dataclass(frozen=True, eq=False)
class Picture:
    """`name`: its path in the folder. `caption`: in characters of the vocabulary. `picture`: uint8
    [h, w, 3], on white. `hash`: of the file's content."""

    name: str
    caption: str
    picture: np.ndarray
    hash: int


@functools.cache
def read(folder: pathlib.Path, side: int) -> tuple[Picture, ...]:
    """All pictures of a folder and of the folders in it, by name, each at most `side` pixels high
    and wide.

    Raises UserError if the folder or its captions are missing, or with everything that is wrong:
    pictures without a caption, captions of no picture, files that cannot be decoded.
    """
    files = _files(folder)
    names = [name for name in files if name.lower().endswith(ENDINGS)]
    if not names:
        raise UserError(
            f"{folder} has no pictures: files that end in {', '.join(ENDINGS)} are looked for,"
            " in the folders in it too"
        )
    captions = caption_files.find(folder, files, names)
    written = {name: plain(text) for name, text in captions.of.items()}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda name: decoded(folder / name, side), names))
    broken = {n: f for n, f in zip(names, found, strict=True) if isinstance(f, str)}
    wrong = [
        *_listed(
            "pictures without a caption",
            [name for name in names if name not in written],
            "give each one, or move it out of the folder",
        ),
        *_listed("pictures with several captions", captions.twice, "keep one"),
        *_listed(
            "captions of no picture", captions.strays, f"pictures end in {', '.join(ENDINGS)}"
        ),
        *_listed(
            "captions without a character of the vocabulary",
            [n for n in names if written.get(n) == ""],
            "write them in the letters a to z",
        ),
        *_listed(
            "pictures that cannot be decoded",
            [f"{name} ({reason})" for name, reason in broken.items()],
            "save them anew",
        ),
    ]
    if wrong:
        raise UserError(
            "\n  ".join(
                [f"{folder} with its {len(names)} pictures cannot be used as it is:", *wrong]
            )
        )
    return tuple(
        Picture(name, written[name], *f)
        for name, f in zip(names, found, strict=True)
        if not isinstance(f, str)
    )


def _files(folder: pathlib.Path) -> list[str]:
    """Paths of the files in a folder and in those in it, but not of hidden ones, and not of what
    macOS adds to archives. Folders that are links count, but not those that lead back up."""
    if not folder.is_dir():
        raise UserError(
            f"there is no folder {folder}: --config.data.folder must name one of pictures;"
            f" {caption_files.FORMS}"
        )
    files = []
    for place, folders, names in os.walk(folder, followlinks=True):
        inside = pathlib.Path(place).relative_to(folder)
        above = {os.path.realpath(folder / p) for p in (inside, *inside.parents)}
        folders[:] = [
            name
            for name in folders
            if name[0] != "."
            and name != "__MACOSX"
            and os.path.realpath(os.path.join(place, name)) not in above
        ]
        files += [(inside / name).as_posix() for name in names if name[0] != "."]
    return sorted(files)


def _listed(what: str, names: list[str], remedy: str) -> Iterator[str]:
    if names:
        more = ", ..." if len(names) > SHOWN else ""
        yield f"{what}, {len(names)}: {', '.join(names[:SHOWN])}{more}; {remedy}"


def decoded(path: pathlib.Path, side: int) -> tuple[np.ndarray, int] | str:
    """A picture file as people see it, uint8 [h, w, 3] with each side at most `side` pixels: turned
    as its camera says, see-through parts white, of several frames the first; and the hash of the
    file. A few words instead if it cannot be decoded."""
    from PIL import Image, ImageOps

    try:
        content = path.read_bytes()
        with Image.open(path) as opened:
            opened.draft(None, (2 * side, 2 * side))  # large JPEGs are decoded smaller
            if opened.mode in ("I", "F"):  # nothing says which of their values is white
                return "32-bit pixels"
            picture = ImageOps.exif_transpose(opened)
            if picture.mode.startswith("I;16"):  # Pillow would make all but the darkest white
                picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
            rgba = picture.convert("RGBA")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return " ".join(str(error).replace(str(path), path.name).split())[:80]
    rgba.thumbnail((side, side), Image.Resampling.BOX)
    ground = Image.new("RGBA", rgba.size, "white")
    pixels = np.array(Image.alpha_composite(ground, rgba).convert("RGB"))
    pixels.setflags(write=False)
    return pixels, int.from_bytes(hashlib.sha256(content).digest()[:8], "big")


@functools.cache
def split(folder: pathlib.Path, side: int, which: str) -> tuple[Picture, ...]:
    """The pictures of a split, `train` or `heldout`, in the order of their hashes.

    A picture is held out if its file's hash is divisible by HELDOUT_EVERY: equal files are on one
    side, and other pictures do not matter. Raises UserError where a split would have fewer than
    LEAST.
    """
    sides: dict[bool, list[Picture]] = {True: [], False: []}
    for picture in read(folder, side):
        sides[picture.hash % HELDOUT_EVERY == 0].append(picture)
    train, heldout = len(sides[False]), len(sides[True])
    if min(train, heldout) < LEAST:
        raise UserError(
            f"{folder} has too few pictures: of {train + heldout}, {train} are to train on and"
            f" {heldout} held out (1 in {HELDOUT_EVERY}, by a hash of the file), and each needs"
            f" {LEAST}; {ENOUGH} pictures are nearly always enough"
        )
    chosen = sides[which == "heldout"]
    return tuple(sorted(chosen, key=lambda picture: (picture.hash, picture.name)))


@functools.cache
def fitted(folder: pathlib.Path, side: int, characters: int) -> dict[str, str]:
    """The caption of each picture by name, or its first sentence where all of it has more than
    `characters`. Raises UserError that says how long captions would have to be if that is not
    enough."""
    pictures = read(folder, side)
    short = {p.name: shortened(p.caption, characters) for p in pictures}
    long = {p.name: len(first_sentence(p.caption)) for p in pictures if short[p.name] is None}
    if long:
        names = [f"{name} ({length})" for name, length in long.items()]
        more = ", ..." if len(names) > SHOWN else ""
        raise UserError(
            f"{folder}: {len(long)} captions have no first sentence of up to {characters}"
            f" characters: {', '.join(names[:SHOWN])}{more};"
            f" --config.model.text_length={max(long.values()) + 2} would do"
        )
    return {name: caption for name, caption in short.items() if caption is not None}
