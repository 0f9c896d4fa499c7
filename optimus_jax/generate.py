"""python -m optimus_jax.generate --image=FILE: the trained model's reading of a picture."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
from absl import flags

from optimus_jax import command
from optimus_jax.config import ModelConfig
from optimus_jax.data import sources
from optimus_jax.evaluate import load_decoder

command.define_config()
flags.DEFINE_string("image", None, "The picture to read.")


def main() -> int:
    config, workdir = command.config(), command.workdir()
    if not flags.FLAGS.image:
        raise command.UserError("no picture: pass --image=FILE")
    path = pathlib.Path(flags.FLAGS.image)
    light_on_dark = sources.make(config.data).light_on_dark
    image, changes = load_image(path, config.model, light_on_dark)
    caption = load_decoder(config, workdir).captions(image[None])[0]
    if changes:
        command.say(f"the picture was {', then '.join(changes)}")
    command.say(caption or "(nothing)")
    if flags.FLAGS.json:
        command.emit({"caption": caption})
    return 0


def load_image(
    path: pathlib.Path, model: ModelConfig, light_on_dark: bool
) -> tuple[np.ndarray, list[str]]:
    """A picture file as the model takes it, uint8 [H, W, C], and how it was changed. Where models
    know light things on a dark ground it is made so; else what lies around it becomes white.

    Raises UserError if the file cannot be read as a picture.
    """
    from PIL import Image, ImageOps

    mode = "L" if model.image_channels == 1 else "RGB"
    try:
        with Image.open(path) as opened:
            picture = ImageOps.exif_transpose(opened)
            if picture.has_transparency_data:
                picture = _grounded(picture, choose=light_on_dark)
            picture = picture.convert(mode)
    except FileNotFoundError:
        raise command.UserError(f"--image={path}: there is no such file") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise command.UserError(
            f"--image={path}: not a picture that can be read ({error})"
        ) from None
    size = model.image_width, model.image_height
    changes = []
    border = np.asarray(picture)
    edge = np.concatenate([border[0], border[-1], border[:, 0], border[:, -1]])
    if light_on_dark and edge.mean() > 127:
        picture = picture.point(lambda value: 255 - value)
        changes.append("inverted, since the model knows light things on a dark ground")
    if picture.size != size:
        old = f"{picture.width} x {picture.height}"
        scale = min(size[0] / picture.width, size[1] / picture.height)
        fitted = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
        canvas = Image.new(mode, size, "black" if light_on_dark else "white")
        place = (size[0] - fitted[0]) // 2, (size[1] - fitted[1]) // 2
        canvas.paste(picture.resize(fitted, Image.Resampling.BOX), place)
        picture = canvas
        changes.append(f"scaled from {old} to {size[0]} x {size[1]} pixels (width x height)")
    return np.asarray(picture).reshape(size[1], size[0], model.image_channels), changes


def _grounded(picture: Any, choose: bool) -> Any:
    """A see-through picture on white; if the ground is to be chosen, black under light ink."""
    from PIL import Image

    rgba = picture.convert("RGBA")
    ink, opaque = np.asarray(rgba.convert("L"), float), np.asarray(rgba.getchannel("A"), float)
    light = choose and (ink * opaque).sum() > 127 * opaque.sum()
    return Image.alpha_composite(Image.new("RGBA", rgba.size, "black" if light else "white"), rgba)


if __name__ == "__main__":
    command.run(main)
