"""Pictures of a folder as a data set: examples by index, mirrors, what does not fit."""

from __future__ import annotations

import pathlib
import pickle
import shutil

import numpy as np
import pytest
from PIL import Image

from optimus_jax import evaluate, train
from optimus_jax.data import picture_folder, tokens
from optimus_jax.data.batches import Batches, examples
from optimus_jax.data.folder import SIDE, Folder
from optimus_jax.data.picture_folder import split
from optimus_jax.data.variation import placed
from optimus_jax.errors import UserError
from tests.conftest import RunHere
from tests.data.small_sets import own_folder

CANVAS = (24, 32)


def dataset(folder: pathlib.Path, which: str, length: int = 20, **options: bool):
    return examples(Folder(str(folder), **options), which, 0, CANVAS, 12, 12 + length)


def test_held_out_pictures_come_in_order_unchanged(tmp_path: pathlib.Path) -> None:
    folder = own_folder(tmp_path)
    kept, data = split(folder, SIDE, "heldout"), dataset(folder, "heldout")
    assert Folder(str(folder)).load("heldout") == len(kept) > 3
    for k in (0, 1, len(kept), 2 * len(kept) - 1):
        wanted = kept[k % len(kept)]
        assert data[k]["caption"] == wanted.caption == tokens.decode(data[k]["tokens"])
        np.testing.assert_array_equal(data[k]["image"], placed(wanted.picture, CANVAS))


def test_train_pictures_are_varied_by_seed_step_and_row_alone(tmp_path: pathlib.Path) -> None:
    folder = own_folder(tmp_path)
    data = dataset(folder, "train")
    drawn = [data[k] for k in range(200)]
    assert {e["caption"] for e in drawn} == {p.caption for p in split(folder, SIDE, "train")}
    assert len({e["image"].tobytes() for e in drawn}) == 200
    rows = Batches(dataset(folder, "train"), 8).rows(3, [5, 1])
    for place, row in enumerate((5, 1)):
        np.testing.assert_array_equal(rows["image"][place], drawn[3 * 8 + row]["image"])
    other = examples(Folder(str(folder)), "train", 1, CANVAS, 12, 32)
    assert not np.array_equal(other[7]["image"], drawn[7]["image"])


@pytest.mark.parametrize(
    ("mirror", "caption", "sides"),
    [
        (False, "a thing", {True}),
        (True, "a thing", {True, False}),
        (True, "Left of a thing", {True}),
        (True, "aleft thing", {True, False}),
    ],
)
def test_pictures_are_mirrored_only_if_asked_and_if_no_side_is_named(
    tmp_path: pathlib.Path, mirror: bool, caption: str, sides: set[bool]
) -> None:
    own_folder(tmp_path, lambda k: caption, count=40)
    for k in range(40):
        picture = Image.new("RGB", (20, 20), (150, 150, 150))
        picture.paste((k, 0, 0), (0, 0, 8, 20))  # dark on the left
        picture.save(tmp_path / f"{k:02d}.png")
    data = dataset(tmp_path, "train", mirror=mirror)
    found = set()
    for k in range(40):
        ink = np.nonzero((data[k]["image"] < 250).any((0, 2)))[0]
        dark = np.nonzero((data[k]["image"][:, :, 2] < 60).any(0))[0]
        found.add(bool(dark.mean() < ink.mean()))
    assert found == sides


def test_what_a_source_pickles_to_is_small(tmp_path: pathlib.Path) -> None:
    folder = own_folder(tmp_path)
    source = Folder(str(folder)).fitted((300, 200), 18)
    assert source.side == 300 and source.characters == 18
    source.load("train")
    assert len(pickle.dumps(source)) < 1000


def test_long_captions_are_shortened_or_refused_before_the_first_example(
    tmp_path: pathlib.Path,
) -> None:
    own_folder(tmp_path, lambda k: f"Thing {k}. It is one of many.")
    assert all(len(dataset(tmp_path, "train")[k]["caption"]) <= 9 for k in range(20))
    with pytest.raises(UserError, match=r"of up to 7 characters: .*model.text_length=11 would do"):
        dataset(tmp_path, "heldout", length=9)


def test_the_digest_tells_other_pictures_and_captions_but_not_other_places(
    tmp_path: pathlib.Path,
) -> None:
    digest = Folder(str(own_folder(tmp_path / "one"))).digest()
    assert Folder(str(own_folder(tmp_path / "two"))).digest() == digest
    more = Folder(str(own_folder(tmp_path / "more", count=41))).digest()
    words = Folder(str(own_folder(tmp_path / "words", lambda k: f"Thing {k}"))).digest()
    shutil.copy(tmp_path / "one/01.png", tmp_path / "two/00.png")
    picture_folder.read.cache_clear()
    assert len({digest, more, words, Folder(str(tmp_path / "two")).digest()}) == 4


def test_a_folder_of_the_home_is_found(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_folder(tmp_path / "pictures")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Folder("~/pictures").load("heldout") == Folder(str(tmp_path / "pictures")).load(
        "heldout"
    )


def test_an_unknown_split_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"'test' does not exist.*train, heldout"):
        Folder(str(tmp_path)).load("test")


@pytest.mark.parametrize("module", [evaluate, train])
def test_a_missing_folder_ends_a_command_in_words(
    run_here: RunHere, tmp_path: pathlib.Path, module: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the devices of this process are there already
    monkeypatch.setattr(train, "prepare_devices", lambda config, **_: None)
    words = ["--config=configs/own.py", f"--config.data.folder={tmp_path}/none"]
    done = run_here(module.main, *words, f"--workdir={tmp_path}/run")
    assert done.code == 2 and done.err.count("\n") == 1
    assert done.err.startswith(f"there is no folder {tmp_path}/none: --config.data.folder must")
