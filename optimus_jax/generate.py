"""python -m optimus_jax.generate --image=FILE: the trained model's reading of a picture."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
from absl import flags

from optimus_jax import command
from optimus_jax.config import ModelConfig
from optimus_jax.evaluate import load_decoder

command.define_config()
flags.DEFINE_string("image", None, "The picture to read.")


def main() -> int:
    config, workdir = command.config(), command.workdir()
    if not flags.FLAGS.image:
        raise command.UserError("no picture: pass --image=FILE")
    path = pathlib.Path(flags.FLAGS.image)
    image, changes = load_image(path, config.model)
    caption = load_decoder(config, workdir).captions(image[None])[0]
    if changes:
        command.say(f"the picture was {', then '.join(changes)}")
    command.say(caption or "(nothing)")
    if flags.FLAGS.json:
        command.emit({"caption": caption})
    return 0


def load_image(path: pathlib.Path, model: ModelConfig) -> tuple[np.ndarray, list[str]]:
    """A picture file as the model takes it, uint8 [H, W, 1] light on dark, and how it was changed.

    Raises UserError if the file cannot be read as a picture.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as opened:
            picture = ImageOps.exif_transpose(opened)
            if picture.has_transparency_data:
                picture = _grounded(picture)
            picture = picture.convert("L")
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
    if edge.mean() > 127:
        picture = picture.point(lambda value: 255 - value)
        changes.append("inverted, since the model knows light digits on a dark ground")
    if picture.size != size:
        old = f"{picture.width} x {picture.height}"
        scale = min(size[0] / picture.width, size[1] / picture.height)
        fitted = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
        canvas = Image.new("L", size)
        place = (size[0] - fitted[0]) // 2, (size[1] - fitted[1]) // 2
        canvas.paste(picture.resize(fitted, Image.Resampling.BOX), place)
        picture = canvas
        changes.append(f"scaled from {old} to {size[0]} x {size[1]} pixels (width x height)")
    return np.asarray(picture)[:, :, None], changes


def _grounded(picture: Any) -> Any:
    """A see-through picture on a ground that its ink shows on: white, black under light ink."""
    from PIL import Image

    rgba = picture.convert("RGBA")
    ink, opaque = np.asarray(rgba.convert("L"), float), np.asarray(rgba.getchannel("A"), float)
    light = (ink * opaque).sum() > 127 * opaque.sum()
    return Image.alpha_composite(Image.new("RGBA", rgba.size, "black" if light else "white"), rgba)


if __name__ == "__main__":
    command.run(main)
