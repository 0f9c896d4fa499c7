"""Tiny folders in the formats of the data sets."""

from __future__ import annotations

import csv
import gzip
import pathlib
from collections.abc import Callable

import numpy as np
from PIL import Image


def write_idx(path: pathlib.Path, values: np.ndarray) -> None:
    """uint8 values as a gzipped IDX file."""
    start = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">i4").tobytes()
    path.write_bytes(gzip.compress(start + values.astype(np.uint8).tobytes()))


def fashion_folder(folder: pathlib.Path, train: int = 20, test: int = 10) -> pathlib.Path:
    """Picture k of a split is k everywhere, train ones 100 more, with label k modulo 10."""
    folder.mkdir(parents=True, exist_ok=True)
    for prefix, count, first in (("train", train, 100), ("t10k", test, 0)):
        images = np.broadcast_to(first + np.arange(count)[:, None, None], (count, 28, 28))
        write_idx(folder / f"{prefix}-images-idx3-ubyte.gz", images)
        write_idx(folder / f"{prefix}-labels-idx1-ubyte.gz", np.arange(count) % 10)
    return folder


def stamp(
    folder: pathlib.Path,
    name: str,
    caption: str | None = None,
    picture: Image.Image | None = None,
    facts: str | None = None,
) -> None:
    """NAME.png with its NAME.txt and NAME.dat; without a picture, noise that depends on `name`."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if picture is None:
        rng = np.random.default_rng(list(name.encode()))
        picture = Image.fromarray(rng.integers(256, size=(30, 40, 3), dtype=np.uint8))
    picture.save(path.with_name(path.name + ".png"))
    if caption is not None:
        translated = f"{caption}\nde.utf8=Etwas.\n"
        path.with_name(path.name + ".txt").write_text(translated, encoding="utf-8")
    if facts is not None:
        path.with_name(path.name + ".dat").write_text(facts)


def stamps_folder(folder: pathlib.Path, count: int = 40) -> pathlib.Path:
    """Stamps of noise with captions of their own, in two sub-folders."""
    for k in range(count):
        word = chr(ord("a") + k // 26) + chr(ord("a") + k % 26)
        stamp(folder, f"{'odd' if k % 2 else 'even'}/{word}", f"A thing “{word}”.")
    return folder


def noise(k: int, height: int = 30, width: int = 40) -> Image.Image:
    """Picture k: the same in every run, and unlike others."""
    rng = np.random.default_rng(k)
    return Image.fromarray(rng.integers(256, size=(height, width, 3), dtype=np.uint8))


def own_folder(
    folder: pathlib.Path, caption: Callable[[int], str] = "thing {}".format, count: int = 40
) -> pathlib.Path:
    """Pictures of noise with captions in captions.csv."""
    folder.mkdir(parents=True, exist_ok=True)
    for k in range(count):
        noise(k).save(folder / f"{k:02d}.png")
    rows = [("file_name", "caption"), *((f"{k:02d}.png", caption(k)) for k in range(count))]
    with (folder / "captions.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    return folder
