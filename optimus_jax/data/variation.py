"""A coloured picture on a white canvas: as large as it fits, or in training a little otherwise."""

from __future__ import annotations

import numpy as np

SMALLEST = 0.7  # train pictures are scaled by this to 1, times the scale at which they just fit
STRETCH = 0.1  # and their proportions changed by up to this share
COLOUR = 0.2  # and each colour of the ink weakened or strengthened by up to this share


def varied(
    picture: np.ndarray, rng: np.random.Generator, canvas: tuple[int, int], may_flip: bool
) -> np.ndarray:
    """A picture uint8 [h, w, 3] on a white canvas, uint8 [height, width, 3]: smaller, stretched,
    elsewhere, in other shades, and half of the time mirrored where it may be."""
    if rng.random() < 0.5 and may_flip:
        picture = picture[:, ::-1]
    scale = rng.uniform(SMALLEST, 1)
    # 1 is the largest that fits, so one side is shortened rather than the other one lengthened
    shorter = 1 - rng.uniform(0, STRETCH)
    scales = (scale * shorter, scale) if rng.random() < 0.5 else (scale, scale * shorter)
    image = placed(picture, canvas, scales, tuple(rng.random(2)))
    ink = (255.0 - image) * rng.uniform(1 - COLOUR, 1 + COLOUR, 3)  # white stays white
    return np.rint(255 - np.minimum(ink, 255)).astype(np.uint8)


def placed(
    picture: np.ndarray,
    canvas: tuple[int, int],
    scales: tuple[float, float] = (1.0, 1.0),
    place: tuple[float, ...] = (0.5, 0.5),
) -> np.ndarray:
    """A picture uint8 [h, w, 3] on a white canvas [height, width, 3]: as large as it fits with its
    proportions kept, times `scales` (of height and width, at most 1); `place` is the share of the
    free room that is left above and to the left of it."""
    from PIL import Image

    height, width, _ = picture.shape
    fit = min(canvas[0] / height, canvas[1] / width)
    size = [max(1, round(n * fit * s)) for n, s in zip((height, width), scales, strict=True)]
    scaled = Image.fromarray(picture).resize((size[1], size[0]), Image.Resampling.BILINEAR)
    top, left = (
        round((room - taken) * share)
        for room, taken, share in zip(canvas, size, place, strict=True)
    )
    image = np.full((*canvas, 3), 255, np.uint8)
    image[top : top + size[0], left : left + size[1]] = np.asarray(scaled)
    return image
