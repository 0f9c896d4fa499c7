"""A folder of pictures: what is decoded how, the split, and everything that is wrong at once."""

from __future__ import annotations

import pathlib
import shutil

import numpy as np
import pytest
from PIL import Image

from optimus_jax.data import picture_folder
from optimus_jax.data.picture_folder import decoded, fitted, read, split
from optimus_jax.errors import UserError
from tests.data.small_sets import noise, own_folder


def pixels(path: pathlib.Path, side: int = 100) -> np.ndarray:
    found = decoded(path, side)
    assert not isinstance(found, str), found
    return found[0]


@pytest.mark.parametrize("ending", ["png", "jpg", "JPEG", "webp", "bmp", "gif", "tif"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_every_format_is_read_and_large_pictures_are_made_smaller(
    tmp_path: pathlib.Path, ending: str, mode: str
) -> None:
    picture = Image.new("RGB", (600, 300), (90, 90, 90)).convert(mode)
    picture.save(tmp_path / f"x.{ending}")
    found = pixels(tmp_path / f"x.{ending}")
    assert found.shape == (50, 100, 3) and found.dtype == np.uint8
    assert np.all(np.abs(found.astype(int) - 90) < 12)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_see_through_is_white(tmp_path: pathlib.Path, mode: str) -> None:
    picture = Image.new("RGBA", (20, 10), (0, 0, 0, 0))
    picture.paste((0, 0, 0, 255), (0, 0, 10, 10))
    picture.convert(mode).save(tmp_path / "x.png")
    found = pixels(tmp_path / "x.png")
    assert found.shape == (10, 20, 3)
    assert np.all(found[:, :10] < 20) and np.all(found[:, 10:] == 255)


def test_a_picture_is_turned_as_its_camera_says(tmp_path: pathlib.Path) -> None:
    picture = Image.new("RGB", (40, 20), "black")
    picture.paste((255, 0, 0), (0, 0, 8, 20))  # on the left, so above after a turn to the right
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.save(tmp_path / "x.jpg", exif=exif, quality=95)
    found = pixels(tmp_path / "x.jpg")
    assert found.shape == (40, 20, 3)
    assert found[2, 10, 0] > 200 and found[30, 10, 0] < 50


def test_grey_of_16_bits_and_cmyk_keep_their_shades(tmp_path: pathlib.Path) -> None:
    Image.fromarray(np.full((10, 10), 90 * 257, np.uint16)).save(tmp_path / "x.png")
    assert np.all(pixels(tmp_path / "x.png") == 90)
    Image.new("CMYK", (900, 300), (0, 255, 255, 0)).save(tmp_path / "x.jpg")
    assert np.all(np.abs(pixels(tmp_path / "x.jpg").astype(int) - (255, 0, 0)) < 12)


def test_pictures_of_sub_folders_are_found_and_hidden_ones_left_alone(
    tmp_path: pathlib.Path,
) -> None:
    for name in ("a.png", "sub/deep/b.JPG", ".hidden.png", ".cache/c.png", "__MACOSX/d.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        noise(len(name)).save(tmp_path / name)
    (tmp_path / "a.txt").write_text("“Änne”,  at home\n")
    (tmp_path / "sub/deep/b.txt").write_text("B")
    found = [(p.name, p.caption) for p in read(tmp_path, 20)]
    assert found == [("a.png", '"Anne", at home'), ("sub/deep/b.JPG", "B")]
    assert all(max(p.picture.shape) == 20 for p in read(tmp_path, 20))


def test_pixels_of_32_bits_are_refused(tmp_path: pathlib.Path) -> None:
    for kind in (np.int32, np.float32):
        Image.fromarray(np.full((9, 9), 300, kind)).save(tmp_path / "x.tif")
        assert decoded(tmp_path / "x.tif", 20) == "32-bit pixels"


def test_linked_folders_are_followed_but_not_in_circles(tmp_path: pathlib.Path) -> None:
    folder, other = tmp_path / "own", tmp_path / "other"
    for place in (folder / "sub", other / "deep"):
        place.mkdir(parents=True)
    for path in (folder / "sub/a", other / "deep/b"):
        noise(1).save(path.with_suffix(".png"))
        path.with_suffix(".txt").write_text("A")
    (folder / "more").symlink_to(other)
    (folder / "again").symlink_to(other / "deep")
    (folder / "sub/up").symlink_to(folder)
    (other / "deep/up").symlink_to(other)
    assert [p.name for p in read(folder, 20)] == ["again/b.png", "more/deep/b.png", "sub/a.png"]


def test_everything_that_is_wrong_is_said_at_once(tmp_path: pathlib.Path) -> None:
    for k in range(7):
        noise(k).save(tmp_path / f"lacks{k}.png")
    noise(8).save(tmp_path / "twice.png")
    noise(9).save(tmp_path / "foreign.png")
    whole = (tmp_path / "twice.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.jpg").write_text("not a picture")
    rows = ["twice.png,A", "twice.png,B", "foreign.png,ворона", "cut.png,C", "text.jpg,D"]
    rows += ["photo.heic,E", "lacks0.png,"]
    (tmp_path / "captions.csv").write_text("\n".join(["file,text", *rows]), encoding="utf-8")
    with pytest.raises(UserError) as raised:
        read(tmp_path, 20)
    lines = str(raised.value).split("\n  ")
    assert lines[0] == f"{tmp_path} with its 11 pictures cannot be used as it is:"
    assert lines[1] == (
        "pictures without a caption, 7: lacks0.png, lacks1.png, lacks2.png, lacks3.png,"
        " lacks4.png, ...; give each one, or move it out of the folder"
    )
    assert lines[2].startswith("pictures with several captions, 1: twice.png in captions.csv; ")
    assert lines[3].startswith("captions of no picture, 1: photo.heic in captions.csv; ")
    assert ".jpeg" in lines[3]
    assert lines[4].startswith("captions without a character of the vocabulary, 1: foreign.png; ")
    assert lines[5].startswith("pictures that cannot be decoded, 2: cut.png (")
    assert "text.jpg (cannot identify image file" in lines[5] and str(tmp_path) not in lines[5]
    assert len(lines) == 6


def test_folders_that_are_missing_or_without_pictures_are_said(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserError, match=r"no folder .*nowhere: --config.data.folder must name one"):
        read(tmp_path / "nowhere", 20)
    (tmp_path / "photo.heic").write_text("")
    with pytest.raises(UserError, match=r"has no pictures: files that end in \.png, \.jpg"):
        read(tmp_path, 20)


def test_splits_share_nothing_and_do_not_depend_on_other_pictures_or_names(
    tmp_path: pathlib.Path,
) -> None:
    few = own_folder(tmp_path / "few", count=60)
    more = own_folder(tmp_path / "more", count=90)
    shutil.copy(more / "00.png", more / "zz.png")  # an equal file goes where its like is
    with (more / "captions.csv").open("a") as file:
        file.write("zz.png,thing 0\r\n")
    names = {
        f: [{p.caption for p in split(f, 20, w)} for w in ("train", "heldout")] for f in (few, more)
    }
    for train, heldout in names.values():
        assert not train & heldout
    assert names[few][0] | names[few][1] == {f"thing {k}" for k in range(60)}
    assert names[few][1] == {c for c in names[more][1] if int(c.split()[1]) < 60}
    assert 5 <= len(names[few][1]) <= 20
    order = [p.name for p in split(more, 20, "train")]
    assert order != sorted(order)


def test_too_few_pictures_for_a_split_are_counted(tmp_path: pathlib.Path) -> None:
    folder = own_folder(tmp_path, count=3)
    with pytest.raises(UserError, match=r"of 3, \d are to train on and \d held out .* needs 2; 40"):
        split(folder, 20, "train")


def test_captions_are_shortened_at_a_sentence_or_the_length_that_would_do_is_said(
    tmp_path: pathlib.Path,
) -> None:
    sentences = "A tree. It stands in the garden."
    own_folder(tmp_path, lambda k: sentences if k else "A house that is long. It stands.", count=9)
    assert fitted(tmp_path, 20, 40)["01.png"] == sentences
    assert fitted(tmp_path, 20, 31)["01.png"] == "A tree."
    assert fitted(tmp_path, 20, 31)["00.png"] == "A house that is long."
    with pytest.raises(UserError) as raised:
        fitted(tmp_path, 20, 20)
    message = str(raised.value)
    assert "1 captions have no first sentence of up to 20 characters: 00.png (21);" in message
    assert message.endswith("--config.model.text_length=23 would do")
    assert fitted(tmp_path, 20, 21)["00.png"] == "A house that is long."


def test_enough_is_enough() -> None:
    share, n = 1 / picture_folder.HELDOUT_EVERY, picture_folder.ENOUGH
    too_few = (1 - share) ** n + n * share * (1 - share) ** (n - 1)
    assert picture_folder.LEAST == 2 and too_few < 0.002
