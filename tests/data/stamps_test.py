"""Stamps from folders of their format: captions, splits, how they are varied, what is refused."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
from PIL import Image, ImageDraw

from optimus_jax.data import stamp_folder, stamps, tokens
from optimus_jax.data.batches import examples
from optimus_jax.data.stamp_folder import Stamp, groups, near_copies, read, split, subject
from optimus_jax.data.stamps import Stamps
from optimus_jax.data.variation import placed
from optimus_jax.errors import UserError
from tests.data.small_sets import stamp, stamps_folder


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return stamps_folder(tmp_path / "stamps")


def dataset(folder: pathlib.Path, split: str, canvas: tuple[int, int] = (24, 32), seed: int = 0):
    return examples(Stamps(str(folder)), split, seed, canvas, 12, 12 + Stamps.longest + 2)


def arrow() -> Image.Image:
    """A dark triangle that points to the right, on a see-through ground with wide margins."""
    picture = Image.new("RGBA", (100, 80), (0, 0, 0, 0))
    ImageDraw.Draw(picture).polygon([(30, 20), (69, 40), (30, 59)], fill=(200, 0, 0, 255))
    return picture


def test_a_stamp_is_its_visible_part_on_white_with_the_first_line(tmp_path: pathlib.Path) -> None:
    stamp(
        tmp_path,
        "signs/arrow",
        "An “Arrow”. It points to the right, or to where you want.",
        arrow(),
    )
    (found,) = read(tmp_path)
    assert (found.name, found.caption, found.may_flip) == ("signs/arrow", 'An "Arrow".', True)
    assert found.picture.shape == (40, 40, 3)
    assert found.picture[20, 2].tolist() == [200, 0, 0]
    assert found.picture[0, -1].tolist() == [255, 255, 255]


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "L", "P"])
def test_every_kind_of_png_is_read_and_large_ones_are_made_smaller(
    tmp_path: pathlib.Path, mode: str
) -> None:
    stamp(tmp_path, "x", "A grey thing.", Image.new("RGB", (300, 150), (90, 90, 90)).convert(mode))
    (found,) = read(tmp_path)
    assert found.picture.shape == (48, 96, 3)
    assert np.all(np.abs(found.picture.astype(int) - 90) < 20)


def test_stamps_without_a_usable_caption_are_left_out(tmp_path: pathlib.Path) -> None:
    stamp(tmp_path, "kept", "Kept.")
    stamp(tmp_path, "kept_mirror")
    stamp(tmp_path, "long", "A caption that goes on and on without any end in sight")
    stamp(tmp_path, "foreign", "ворона")
    (tmp_path / "empty.txt").write_text("")
    stamp(tmp_path, "empty")
    assert [s.name for s in read(tmp_path)] == ["kept"]


def test_stamps_with_a_side_are_not_flipped(tmp_path: pathlib.Path) -> None:
    stamp(tmp_path, "free", "A ball.", facts="noflip\n")  # that is about upside down
    stamp(tmp_path, "letter", "The letter k.", facts="colorable\nnomirror\n")
    stamp(tmp_path, "truck", "A truck.")
    stamp(tmp_path, "truck_mirror")
    stamp(tmp_path, "hand", "A left hand.")
    assert [s.name for s in read(tmp_path) if s.may_flip] == ["free"]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("animals/fly", "fly"),
        ("seasonal/Fly-2_mirror", "fly"),
        ("a/A_filled", "a"),
        ("b/a_outline", "a"),
        ("bat_left", "bat"),
        ("math/7", "7"),
        ("right", "right"),
    ],
)
def test_variants_have_one_subject(name: str, wanted: str) -> None:
    assert subject(name) == wanted


def test_near_copies_are_found_also_mirrored() -> None:
    rng = np.random.default_rng(0)
    one, other = rng.integers(256, size=(2, 32, 32, 3), dtype=np.uint8)
    noisy = np.clip(one.astype(int) + rng.integers(-9, 9, one.shape), 0, 255).astype(np.uint8)
    assert near_copies([one, other, noisy[:, ::-1], np.full_like(one, 255)]) == [(0, 2)]


def test_groups_join_what_is_linked_by_name_or_by_look() -> None:
    def made(name: str, seed: int) -> Stamp:
        picture = np.random.default_rng(seed).integers(256, size=(20, 20, 3), dtype=np.uint8)
        return Stamp(name, name, picture, True)

    given = (made("a/fly", 1), made("b/fly2", 2), made("c/moth", 2), made("d/bee", 3))
    found = [[s.name for s in group] for group in groups(given)]
    assert found == [["a/fly", "b/fly2", "c/moth"], ["d/bee"]]


def test_splits_share_nothing_and_cover_all(folder: pathlib.Path) -> None:
    for k in range(30):
        stamp(folder, f"twins/twin_{chr(97 + k)}", f"Twin {k}.")
        stamp(folder, f"more/twin_{chr(97 + k)}-2", f"Twin {k} again.")
    names = {which: [s.name for s in split(folder, which)] for which in stamps.SPLITS}
    assert sorted(names["train"] + names["heldout"]) == sorted(s.name for s in read(folder))
    assert 10 <= len(names["heldout"]) <= 40
    sides = {which: {subject(name) for name in names[which]} for which in names}
    assert not sides["train"] & sides["heldout"]
    assert names["heldout"] != sorted(names["heldout"])  # folders are mixed


def test_a_split_does_not_depend_on_other_stamps(folder: pathlib.Path) -> None:
    before = {s.name for s in split(folder, "heldout")}
    stamp(folder, "later/zebra", "A zebra.")
    split.cache_clear()
    read.cache_clear()
    assert {s.name for s in split(folder, "heldout")} - {"later/zebra"} == before


def test_held_out_stamps_come_in_order_unchanged(folder: pathlib.Path) -> None:
    kept, data = split(folder, "heldout"), dataset(folder, "heldout")
    assert Stamps(str(folder)).load("heldout") == len(kept) > 3
    for k in (0, 1, len(kept), 2 * len(kept) - 1):
        wanted = kept[k % len(kept)]
        assert data[k]["caption"] == wanted.caption == tokens.decode(data[k]["tokens"])
        assert data[k]["image"].shape == (24, 32, 3) and data[k]["image"].dtype == np.uint8
        np.testing.assert_array_equal(
            data[k]["image"], placed(wanted.picture, (24, 32), (1, 1), (0.5, 0.5))
        )


def test_train_stamps_are_varied_by_seed_and_index_alone(folder: pathlib.Path) -> None:
    data = dataset(folder, "train")
    drawn = [data[k] for k in range(150)]
    captions = {s.caption for s in split(folder, "train")}
    assert {example["caption"] for example in drawn} == captions
    assert len({example["image"].tobytes() for example in drawn}) == 150
    again, other = dataset(folder, "train"), dataset(folder, "train", seed=1)
    for k in (149, 0, 70):
        np.testing.assert_array_equal(again[k]["image"], drawn[k]["image"])
        assert not np.array_equal(other[k]["image"], drawn[k]["image"])


def test_missing_stamps_are_said_with_the_command_that_gets_them(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stamps, "INSTALLED", "nowhere")
    (tmp_path / "datasets" / "stamps").mkdir(parents=True)
    with pytest.raises(UserError) as raised:
        Stamps().load("train")
    assert str(raised.value) == (
        "the data set 'stamps' is not in datasets/stamps or nowhere (no **/*.png there)."
        " Get it with: bash launch/data.sh stamps"
    )


def test_damaged_or_too_few_stamps_are_refused(tmp_path: pathlib.Path) -> None:
    stamp(tmp_path, "few/one", "One.")
    with pytest.raises(UserError, match="too few stamps: none is left for the "):
        for which in stamps.SPLITS:
            Stamps(str(tmp_path / "few")).load(which)
    stamp(tmp_path, "bad/one", "One.")
    path = tmp_path / "bad" / "one.png"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UserError, match=r"one.png cannot be read.*get the data anew"):
        Stamps(str(tmp_path / "bad")).load("train")


def test_an_unknown_split_is_refused(folder: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"'test' does not exist.*train, heldout"):
        Stamps(str(folder)).load("test")


def test_captions_fit_the_length_that_configurations_are_checked_for(folder: pathlib.Path) -> None:
    assert max(len(s.caption) for s in read(folder)) <= stamp_folder.LONGEST == Stamps.longest
