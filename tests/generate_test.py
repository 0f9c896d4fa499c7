"""Pictures as files: what becomes of them before the model sees them, and what is refused."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from optimus_jax import generate
from optimus_jax.config import ModelConfig, from_config_dict
from optimus_jax.errors import UserError
from optimus_jax.generate import load_image
from tests.conftest import RunHere

INVERTED = "inverted, since the model knows light things on a dark ground"


@pytest.fixture
def model(values: dict[str, Any]) -> ModelConfig:
    config = from_config_dict(values).model
    assert (config.image_height, config.image_width) == (16, 40)
    return config


@pytest.fixture
def digit() -> np.ndarray:
    """A light slanted stroke on a dark ground."""
    picture = np.zeros((16, 40), np.uint8)
    for k in range(10):
        picture[3 + k, 8 + k : 11 + k] = 100 + 10 * k
    return picture


def stored(folder: pathlib.Path, picture: Image.Image, name: str = "p.png", **more: Any) -> Any:
    picture.save(folder / name, **more)
    return folder / name


def test_a_fitting_picture_is_left_as_it_is(
    tmp_path: pathlib.Path, model: ModelConfig, digit: np.ndarray
) -> None:
    image, changes = load_image(stored(tmp_path, Image.fromarray(digit)), model, True)
    assert (image.shape, image.dtype, changes) == ((16, 40, 1), np.uint8, [])
    np.testing.assert_array_equal(image[:, :, 0], digit)


def test_dark_digits_on_a_light_ground_are_inverted(
    tmp_path: pathlib.Path, model: ModelConfig, digit: np.ndarray
) -> None:
    image, changes = load_image(stored(tmp_path, Image.fromarray(255 - digit)), model, True)
    assert changes == [INVERTED]
    np.testing.assert_array_equal(image[:, :, 0], digit)


def test_a_larger_picture_of_the_same_shape_is_averaged(
    tmp_path: pathlib.Path, model: ModelConfig, digit: np.ndarray
) -> None:
    large = digit.repeat(8, axis=0).repeat(8, axis=1)
    image, changes = load_image(stored(tmp_path, Image.fromarray(large)), model, True)
    assert changes == ["scaled from 320 x 128 to 40 x 16 pixels (width x height)"]
    np.testing.assert_array_equal(image[:, :, 0], digit)


@pytest.mark.parametrize(
    ("height", "width", "rows", "columns"),
    [
        (32, 32, slice(0, 16), slice(12, 28)),  # a square: in the middle, dark left and right
        (10, 100, slice(6, 10), slice(0, 40)),  # a strip: dark above and below
        (1000, 1, slice(0, 16), slice(19, 20)),  # never less than a pixel
        (8, 8, slice(0, 16), slice(12, 28)),  # enlarged
    ],
)
def test_a_picture_of_another_shape_keeps_its_proportions(
    tmp_path: pathlib.Path,
    model: ModelConfig,
    height: int,
    width: int,
    rows: slice,
    columns: slice,
) -> None:
    grey = Image.fromarray(np.full((height, width), 120, np.uint8))
    image, changes = load_image(stored(tmp_path, grey), model, True)
    assert changes == [f"scaled from {width} x {height} to 40 x 16 pixels (width x height)"]
    wanted = np.zeros((16, 40), np.uint8)
    wanted[rows, columns] = 120
    np.testing.assert_array_equal(image[:, :, 0], wanted)


def test_a_light_ground_is_dark_beside_the_picture_too(
    tmp_path: pathlib.Path, model: ModelConfig
) -> None:
    page = np.full((32, 32), 255, np.uint8)
    page[10:20, 10:20] = 0
    image, changes = load_image(stored(tmp_path, Image.fromarray(page)), model, True)
    assert changes == [INVERTED, "scaled from 32 x 32 to 40 x 16 pixels (width x height)"]
    assert image[5:10, 17:22].min() == 255
    assert image.sum() == 25 * 255


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "LA", "1", "CMYK", "I"])
def test_every_kind_of_pixel_is_read_as_brightness(
    tmp_path: pathlib.Path, model: ModelConfig, mode: str
) -> None:
    picture = Image.fromarray(np.uint8([[0] * 40] * 8 + [[255] * 40] * 8)).convert(mode)
    name = "p.tiff" if mode in ("CMYK", "I") else "p.png"
    image, _ = load_image(stored(tmp_path, picture, name), model, True)
    assert abs(int(image[:8].max()) - int(image[8:].min())) > 250


@pytest.mark.parametrize("ink", [0, 255])
@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_ink_on_a_see_through_ground_is_seen(
    tmp_path: pathlib.Path, model: ModelConfig, digit: np.ndarray, ink: int, mode: str
) -> None:
    """Where nothing is drawn the colour below is arbitrary; here it is that of the ink."""
    opaque = np.where(digit > 0, 255, 0)
    picture = np.stack([*[np.full_like(opaque, ink)] * 3, opaque], axis=-1).astype(np.uint8)
    path = stored(tmp_path, Image.fromarray(picture).convert(mode))
    image, changes = load_image(path, model, True)
    assert changes == ([INVERTED] if ink == 0 else [])
    np.testing.assert_array_equal(image[:, :, 0], opaque)


def test_a_palette_with_a_see_through_colour(
    tmp_path: pathlib.Path, model: ModelConfig, digit: np.ndarray
) -> None:
    picture = Image.fromarray(np.uint8(digit > 0))
    picture = picture.convert("P")
    picture.putpalette([255, 0, 255, 10, 10, 10])
    image, changes = load_image(stored(tmp_path, picture, transparency=0), model, True)
    assert changes == [INVERTED]
    np.testing.assert_array_equal(image[:, :, 0], np.where(digit > 0, 245, 0))


def test_coloured_pictures_stay_as_they_are_with_white_around(
    tmp_path: pathlib.Path, model: ModelConfig
) -> None:
    model = dataclasses.replace(model, image_channels=3)
    for colour in ((250, 240, 230), (10, 20, 30)):
        path = stored(tmp_path, Image.new("RGB", (16, 16), colour))
        image, changes = load_image(path, model, False)
        assert changes == ["scaled from 16 x 16 to 40 x 16 pixels (width x height)"]
        assert image.shape == (16, 40, 3) and image.dtype == np.uint8
        assert np.all(image[:, 12:28] == colour)
        assert np.all(image[:, :12] == 255) and np.all(image[:, 28:] == 255)


def test_coloured_pictures_are_seen_on_white(tmp_path: pathlib.Path, model: ModelConfig) -> None:
    model = dataclasses.replace(model, image_channels=3)
    light = Image.new("RGBA", (40, 16), (0, 0, 0, 0))
    light.paste((250, 250, 0, 255), (10, 4, 20, 8))
    image, changes = load_image(stored(tmp_path, light), model, False)
    assert changes == []
    wanted = np.full((16, 40, 3), 255)
    wanted[4:8, 10:20] = (250, 250, 0)
    np.testing.assert_array_equal(image, wanted)


@pytest.mark.parametrize("mode", ["L", "P", "LA", "1", "CMYK", "I"])
def test_every_kind_of_pixel_is_read_as_colour(
    tmp_path: pathlib.Path, model: ModelConfig, mode: str
) -> None:
    model = dataclasses.replace(model, image_channels=3)
    picture = Image.fromarray(np.uint8([[0] * 40] * 8 + [[255] * 40] * 8)).convert(mode)
    name = "p.tiff" if mode in ("CMYK", "I") else "p.png"
    image, _ = load_image(stored(tmp_path, picture, name), model, False)
    assert image.shape == (16, 40, 3)
    assert image[:8].max() < 5 and image[8:].min() > 250


def test_a_photograph_is_turned_as_its_camera_says(
    tmp_path: pathlib.Path, model: ModelConfig, digit: np.ndarray
) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the stored picture is to be turned a quarter clockwise
    turned = Image.fromarray(digit).transpose(Image.Transpose.ROTATE_90)
    image, changes = load_image(stored(tmp_path, turned, exif=exif), model, True)
    assert changes == []
    np.testing.assert_array_equal(image[:, :, 0], digit)


PPM = b"P5\n4x 4\n255\n" + bytes(16)


@pytest.mark.parametrize(
    "content", [b"", b"no picture", PPM, b"\x89PNG\r\n\x1a\n" + bytes(40)], ids=range(4)
)
def test_what_is_no_picture_is_refused(
    tmp_path: pathlib.Path, model: ModelConfig, content: bytes
) -> None:
    path = tmp_path / "p.png"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"--image={path}: not a picture that can be read"):
        load_image(path, model, True)


def test_half_a_picture_is_refused(
    tmp_path: pathlib.Path, model: ModelConfig, digit: np.ndarray
) -> None:
    path = stored(tmp_path, Image.fromarray(digit))
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(UserError, match="not a picture that can be read"):
        load_image(path, model, True)


def test_a_folder_and_a_missing_file_are_refused(
    tmp_path: pathlib.Path, model: ModelConfig
) -> None:
    with pytest.raises(UserError, match="not a picture that can be read"):
        load_image(tmp_path, model, True)
    with pytest.raises(UserError, match=r"nothing.png: there is no such file"):
        load_image(tmp_path / "nothing.png", model, True)


def test_the_command_says_what_is_missing(
    run_here: RunHere, tmp_path: pathlib.Path, digit: np.ndarray
) -> None:
    done = run_here(generate.main)
    assert (done.code, done.err) == (2, "no picture: pass --image=FILE\n")
    done = run_here(generate.main, "--image=nothing.png")
    assert (done.code, done.err) == (2, "--image=nothing.png: there is no such file\n")
    path = stored(tmp_path, Image.fromarray(digit))
    done = run_here(generate.main, f"--image={path}", f"--workdir={tmp_path}")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"no checkpoints in {tmp_path}: train first, or name another")
