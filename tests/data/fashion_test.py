"""Fashion-MNIST from files of its format, and what is said where they are missing or damaged."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from optimus_jax.data import fashion
from optimus_jax.data.batches import examples
from optimus_jax.data.fashion import CAPTIONS, Fashion
from optimus_jax.errors import UserError
from tests.data.small_sets import fashion_folder, write_idx

TEST_LABELS = "t10k-labels-idx1-ubyte.gz"
TEST_IMAGES = "t10k-images-idx3-ubyte.gz"


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return fashion_folder(tmp_path / "fashion")


def dataset(folder: pathlib.Path, split: str, canvas: tuple[int, int] = (28, 28)):
    return examples(Fashion(str(folder)), split, 0, canvas, 16, 16 + Fashion.longest + 2)


def test_captions_are_english() -> None:
    assert CAPTIONS[1] == "a photo of trousers"
    for caption in CAPTIONS[:1] + CAPTIONS[2:]:
        article, thing = caption.removeprefix("a photo of ").split(" ", 1)
        assert article == ("an" if thing[0] in "aeiou" else "a")
    assert len(set(CAPTIONS)) == 10
    assert Fashion.longest == len("a photo of an ankle boot")


def test_held_out_examples_are_the_test_pictures_in_order(folder: pathlib.Path) -> None:
    data = dataset(folder, "heldout")
    assert Fashion(str(folder)).load("heldout") == 10
    for k in range(20):
        assert data[k]["image"].dtype == np.uint8 and data[k]["image"].shape == (28, 28, 1)
        assert np.all(data[k]["image"] == k % 10)
        assert data[k]["caption"] == CAPTIONS[k % 10]


def test_train_examples_are_train_pictures_at_random(folder: pathlib.Path) -> None:
    data = dataset(folder, "train")
    assert Fashion(str(folder)).load("train") is None
    drawn = [data[k] for k in range(200)]
    numbers = [int(example["image"][0, 0, 0]) - 100 for example in drawn]
    assert set(numbers) == set(range(20)) and numbers[:20] != sorted(numbers[:20])
    assert [CAPTIONS[number % 10] for number in numbers] == [e["caption"] for e in drawn]
    again = dataset(folder, "train")
    assert all(np.array_equal(again[k]["image"], drawn[k]["image"]) for k in (7, 3, 199))


def test_a_larger_canvas_is_dark_around_the_picture(folder: pathlib.Path) -> None:
    image = dataset(folder, "heldout", (32, 40))[5]["image"][:, :, 0]
    assert np.all(image[2:30, 6:34] == 5)
    assert image.sum() == 5 * 28 * 28
    with pytest.raises(ValueError, match=r"garments do not fit.*27 x 28.*would do is 28 x 28"):
        dataset(folder, "heldout", (27, 28))


def test_an_unknown_split_is_refused(folder: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"'test' does not exist.*train, heldout"):
        Fashion(str(folder)).load("test")


def test_pictures_are_read_once_and_cannot_be_written_over(folder: pathlib.Path) -> None:
    pool = fashion.load("train", str(folder))
    assert fashion.load("train", str(folder)) is pool
    with pytest.raises(ValueError, match="read-only"):
        pool.images[0] = 0


def test_missing_data_is_said_with_the_command_that_gets_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fashion, "INSTALLED", "nowhere")
    with pytest.raises(UserError) as raised:
        Fashion().load("train")
    assert str(raised.value) == (
        "the data set 'fashion' is not in datasets/fashion or nowhere (no"
        " train-images-idx3-ubyte.gz there). Get it with: bash launch/data.sh fashion"
    )
    with pytest.raises(UserError, match=r"not in elsewhere \(.*leave --config.data.folder away"):
        Fashion("elsewhere").load("heldout")


def test_the_usual_places_are_looked_in(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fashion, "INSTALLED", str(fashion_folder(tmp_path / "installed", test=3)))
    assert len(fashion.load.__wrapped__("heldout", "").labels) == 3
    fashion_folder(tmp_path / "datasets" / "fashion", test=4)  # comes first
    assert len(fashion.load.__wrapped__("heldout", "").labels) == 4


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (TEST_IMAGES, b"no gzip"),
        (TEST_IMAGES, None),  # cut off
        (TEST_IMAGES, np.zeros((10, 28), np.uint8)),
        (TEST_IMAGES, np.zeros((10, 20, 28), np.uint8)),
        (TEST_LABELS, np.zeros(9, np.uint8)),
        (TEST_LABELS, np.full(10, 10, np.uint8)),
    ],
    ids=range(6),
)
def test_damaged_files_are_refused(folder: pathlib.Path, name: str, content) -> None:
    path = folder / name
    if isinstance(content, np.ndarray):
        write_idx(path, content)
    else:
        path.write_bytes(content or path.read_bytes()[:-20])
    with pytest.raises(UserError, match=str(folder)):
        Fashion(str(folder)).load("heldout")
