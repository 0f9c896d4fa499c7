"""Files that are written whole or not at all."""

from __future__ import annotations

import pathlib


def replace_text(path: pathlib.Path, text: str) -> None:
    """Puts `text` into a file; a kill in between leaves the old one."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
