from __future__ import annotations

import itertools

import numpy as np
import pytest
from sklearn.datasets import load_digits

from optimus_jax.data import digits

TRAIN, HELDOUT = digits.load("train"), digits.load("heldout")


def solid_pool() -> digits.Pool:
    """Digits that can be read off a picture: label k is a full square of brightness 100 + k."""
    labels = np.arange(10)
    images = np.broadcast_to((100 + labels).astype(np.uint8)[:, None, None], (10, 8, 8))
    return digits.Pool(images, labels, labels)


def squares(image: np.ndarray) -> list[tuple[int, int, int]]:
    """(label, left, top) of each solid square, left to right; fails on anything but whole ones."""
    picture, found, left = image[:, :, 0], [], 0
    while left < picture.shape[1]:
        rows = np.flatnonzero(picture[:, left])
        if not len(rows):
            left += 1
            continue
        top = int(rows[0])
        square = picture[top : top + 8, left : left + 8]
        assert square.shape == (8, 8) and len(np.unique(square)) == 1
        assert picture[:, left : left + 8].sum(dtype=int) == square.sum(dtype=int)
        found.append((int(square[0, 0]) - 100, left, top))
        left += 8
    return found


def test_splits_share_no_source_and_cover_them_all():
    assert sorted([*TRAIN.sources, *HELDOUT.sources]) == list(range(1797))


def test_splits_share_no_picture():
    pictures = [{image.tobytes() for image in pool.images} for pool in (TRAIN, HELDOUT)]
    assert len(pictures[0]) > 1000 and len(pictures[1]) > 300
    assert not pictures[0] & pictures[1]


@pytest.mark.parametrize("pool", [TRAIN, HELDOUT])
def test_pool_holds_the_pixels_and_labels_of_its_sources(pool):
    data = load_digits()
    assert pool.images.dtype == np.uint8 and pool.images.shape == (len(pool.sources), 8, 8)
    assert (pool.images.min(), pool.images.max()) == (0, 255)
    assert np.array_equal(np.rint(pool.images / 255 * 16), data.images[pool.sources])
    assert np.array_equal(pool.labels, data.target[pool.sources])


def test_a_fifth_of_every_class_is_held_out():
    share = np.bincount(HELDOUT.labels) / np.bincount(load_digits().target)
    assert len(share) == 10
    assert np.all(np.abs(share - 0.2) < 0.01)


def test_digits_are_loaded_once_and_cannot_be_written_over():
    assert digits.load("train") is TRAIN
    with pytest.raises(ValueError, match="read-only"):
        TRAIN.images[0] = 0


def test_an_unknown_split_is_refused_with_the_valid_ones():
    with pytest.raises(ValueError, match=r"'test' does not exist.*train, heldout"):
        digits.load("test")


def test_the_picture_reads_as_its_caption_left_to_right_without_overlap():
    rng = np.random.default_rng(0)
    for _ in range(200):
        image, caption = digits.compose(solid_pool(), rng, (12, 40), (1, 4))
        assert image.dtype == np.uint8 and image.shape == (12, 40, 1)
        assert " ".join(str(label) for label, _, _ in squares(image)) == caption


def test_count_gaps_and_heights_take_all_their_values():
    rng = np.random.default_rng(0)
    counts, first_lefts, last_rights, gaps, tops = set(), set(), set(), set(), set()
    for _ in range(2000):
        image, _ = digits.compose(solid_pool(), rng, (12, 28), (2, 3))
        found = squares(image)
        counts.add(len(found))
        first_lefts.add(found[0][1])
        last_rights.add(found[-1][1] + 8)
        gaps |= {right[1] - left[1] - 8 for left, right in itertools.pairwise(found)}
        tops |= {top for _, _, top in found}
    assert counts == {2, 3}
    assert tops == {0, 4}
    assert gaps == {0, 4, 8, 12}
    assert min(first_lefts) == 0 and max(last_rights) == 28


def test_the_smallest_canvas_is_filled_edge_to_edge():
    image, caption = digits.compose(solid_pool(), np.random.default_rng(0), (8, 24), (3, 3))
    assert [(left, top) for _, left, top in squares(image)] == [(0, 0), (8, 0), (16, 0)]
    assert len(caption) == 5


def test_real_digits_appear_as_their_pool_has_them():
    rng = np.random.default_rng(1)
    pairs = zip(HELDOUT.images, HELDOUT.labels, strict=True)
    known = {image.tobytes(): label for image, label in pairs}
    image, caption = digits.compose(HELDOUT, rng, (8, 32), (4, 4))
    read = [known[np.ascontiguousarray(image[:, x : x + 8, 0]).tobytes()] for x in (0, 8, 16, 24)]
    assert " ".join(map(str, read)) == caption


def test_the_same_generator_state_composes_the_same_picture():
    drawn = [digits.compose(TRAIN, np.random.default_rng(s), (16, 40), (1, 4)) for s in (5, 5, 6)]
    assert np.array_equal(drawn[0][0], drawn[1][0]) and drawn[0][1] == drawn[1][1]
    assert not np.array_equal(drawn[0][0], drawn[2][0])


@pytest.mark.parametrize("canvas", [(8, 23), (7, 24), (7, 100)])
def test_a_canvas_too_small_is_refused_with_the_smallest_that_would_do(canvas):
    message = rf"3 digits.*height {canvas[0]} and width {canvas[1]};.*would do is \(8, 24\)"
    with pytest.raises(ValueError, match=message):
        digits.compose(TRAIN, np.random.default_rng(0), canvas, (1, 3))


@pytest.mark.parametrize("count", [(0, 2), (3, 2)])
def test_a_count_that_is_no_range_is_refused(count):
    with pytest.raises(ValueError, match=rf"count is \({count[0]}, {count[1]}\).*1 <= low <= high"):
        digits.compose(TRAIN, np.random.default_rng(0), (8, 80), count)
