"""Where the pictures of a data set lie: in a folder that launch/data.sh or a package fills."""

from __future__ import annotations

import os
import pathlib

from optimus_jax.errors import UserError

HERE = pathlib.Path("datasets")  # beside runs/, in the folder that commands are started from


def find(name: str, folder: str, installed: str, member: str) -> pathlib.Path:
    """The folder of the data set `name`: `folder` if that is not empty, else datasets/`name`, else
    `installed`, where the Debian package puts it. It must hold something that matches `member`.

    Raises UserError that says how to get the data.
    """
    places = (
        [pathlib.Path(os.path.expanduser(folder))]
        if folder
        else [HERE / name, pathlib.Path(installed)]
    )
    for place in places:
        if place.is_dir() and next(place.glob(member), None) is not None:
            return place
    where = " or ".join(map(str, places))
    raise UserError(
        f"the data set {name!r} is not in {where} (no {member} there)."
        f" Get it with: bash launch/data.sh {name}"
        + (
            " and leave --config.data.folder away, or let it name the right folder"
            if folder
            else ""
        )
    )
