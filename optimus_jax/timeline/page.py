"""The timelines of several methods as one HTML file that needs nothing else, not even a network."""

from __future__ import annotations

import html
import importlib.resources
import json
import pathlib
import re
from typing import Any

from optimus_jax.files import replace_text

SCRIPTS = ("items.js", "draw.js", "tables.js", "cluster.js", "page.js")  # in the order they need


def write(values: dict[str, Any], path: pathlib.Path) -> None:
    """Writes the page of `values` whole or not at all. ValueError if a number is not finite."""
    replace_text(path, render(values))


def render(values: dict[str, Any]) -> str:
    """The page's text: template, style and script with the values inside."""
    fields = {
        "title": html.escape(values["title"]),
        "kind": "cluster" if values.get("cluster") else "run",
        "css": _template("page.css"),
        "scripts": "".join(map(_template, SCRIPTS)),
        "values": embedded(values),
    }
    # One pass, so that what is filled in is never searched for fields itself.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: fields[found[1]], _template("page.html"))


def embedded(values: dict[str, Any]) -> str:
    """JSON that can stand inside a script element: no string in it can end the element, open a
    comment or break a line as old scripts do, and it still reads back as the same values."""
    text = json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&\u2028\u2029]", lambda found: f"\\u{ord(found[0]):04x}", text)


def _template(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
