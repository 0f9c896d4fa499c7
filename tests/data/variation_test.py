"""Pictures on a white canvas: their proportions, and what training may change about them."""

from __future__ import annotations

import numpy as np
import pytest

from optimus_jax.data.variation import placed, varied


def test_a_picture_keeps_its_proportions_on_white() -> None:
    black = np.zeros((20, 40, 3), np.uint8)
    image = placed(black, (24, 32), (1, 1), (0.5, 0.5))
    assert np.all(image[4:20] == 0) and np.all(np.delete(image, np.s_[4:20], 0) == 255)
    image = placed(black, (24, 32), (0.5, 0.5), (1.0, 0.0))
    assert np.all(image[16:, :16] == 0) and np.sum(image == 0) == 8 * 16 * 3


@pytest.mark.parametrize("may_flip", [False, True])
def test_variation_moves_scales_and_tints_but_mirrors_only_where_allowed(may_flip: bool) -> None:
    picture = np.full((20, 20, 3), (200, 220, 150), np.uint8)
    picture[:, :10] = (100, 150, 0)  # darker on the left
    rng = np.random.default_rng(0)
    darker_left, corners, sizes, shades = set(), set(), set(), set()
    for _ in range(200):
        image = varied(picture, rng, (40, 40), may_flip).astype(int)
        rows, columns = np.nonzero(image[:, :, 2] < 200)
        top, left, right = rows.min(), columns.min(), columns.max()
        darker_left.add(bool(image[top + 5, left + 2, 2] < image[top + 5, right - 2, 2]))
        corners.add((top, left))
        sizes.add((np.ptp(rows) + 1, right - left + 1))
        shades.add(tuple(image[top + 5, left + 2]))
        assert np.all(np.delete(image[top + 5], np.s_[left : right + 1], 0) == 255)
    assert darker_left == ({True, False} if may_flip else {True})
    assert len(corners) > 50 and len(sizes) > 20 and len(shades) > 50
    assert min(min(size) for size in sizes) < 30 and max(max(size) for size in sizes) >= 39
    assert all(0.85 < height / width < 1.18 for height, width in sizes)
