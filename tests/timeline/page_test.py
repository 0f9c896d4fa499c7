"""timeline.html: whole in one file, with the values inside, and drawn by a browser."""

from __future__ import annotations

import copy
import html
import json
import pathlib
import re
from typing import Any

import pytest

from optimus_jax.timeline import page
from tests.timeline.browser import boxes, dumped, needs_browser


def view(scale: float) -> dict[str, Any]:
    """Two devices, one microbatch: times in units of `scale` seconds."""
    first = {
        "tasks": [
            {"name": "EF0.0", "kind": "EF", "start": 0.0, "end": 1 * scale},
            {"name": "F0", "kind": "F", "start": 1 * scale, "end": 3 * scale},
            {"name": "B0", "kind": "B", "start": 8 * scale, "end": 10 * scale},
        ],
        "exchanges": [
            {
                "start": 3 * scale,
                "end": 3.1 * scale,
                "with": 1,
                "features": False,
                "what": ["activation of microbatch 0 stage 1"],
            }
        ],
        "idle": [
            {
                "start": 3 * scale,
                "end": 8 * scale,
                "cause": "pp_other",
                "waits_for": "B0 on device 1",
            }
        ],
    }
    second = {
        "tasks": [
            {"name": "F0", "kind": "F", "start": 3.1 * scale, "end": 5 * scale},
            {"name": "B0", "kind": "B", "start": 5 * scale, "end": 8 * scale},
            {"name": "EB0", "kind": "EB", "start": 8 * scale, "end": 9 * scale},
        ],
        "exchanges": [{**first["exchanges"][0], "with": 0, "features": True}],
        "idle": [
            {
                "start": 0.0,
                "end": 3.1 * scale,
                "cause": "pp_warmup",
                "waits_for": "F0 on device 0",
            },
            {"start": 9 * scale, "end": 10 * scale, "cause": "pp_cooldown", "waits_for": None},
        ],
    }
    epilogue = [10 * scale, 11 * scale]
    return {"end_s": 11 * scale, "epilogue_s": epilogue, "devices": [first, second]}


def sample() -> dict[str, Any]:
    filled = {
        "name": "filled",
        "meaning": "encoder work in every idle interval",
        "predicted_s": 0.11,
        "measured_s": 0.12,
        "iqr_s": 0.001,
        "views": {"predicted": view(0.01), "measured": view(0.012 / 1.1)},
    }
    phased = {
        "name": "phased",
        "meaning": "encoder work before and after the LLM",
        "predicted_s": 0.22,
        "measured_s": None,
        "iqr_s": None,
        "views": {"predicted": view(0.02)},
    }
    return {
        "title": "pp2_m1 on 2 processes",
        "notes": ["costs measured on two cores (16 runs each)"],
        "emulated": False,
        "devices": 2,
        "bound_s": 0.1,
        "methods": [filled, phased],
    }


def hostile() -> dict[str, Any]:
    values = sample()
    values["title"] = "</title><script>alert(1)</script> & {{js}} {{values}}"
    values["notes"] = [
        "</script><script>alert(2)</script>",
        "<!-- <script>",
        "\u2028\u2029 \\u003c é",
    ]
    values["methods"][0]["meaning"] = "\"quotes' & {{css}} </SCRIPT >"
    return values


def read_back(text: str) -> Any:
    found = re.findall(r'<script type="application/json" id="values">(.*?)</script>', text, re.S)
    assert len(found) == 1
    return json.loads(found[0])


@pytest.mark.parametrize("values", [sample(), hostile()], ids=["plain", "hostile"])
def test_values_read_back_as_they_were(values: dict[str, Any], tmp_path: pathlib.Path) -> None:
    before = copy.deepcopy(values)
    page.write(values, tmp_path / "timeline.html")
    text = (tmp_path / "timeline.html").read_text(encoding="utf-8")
    assert read_back(text) == values == before


def test_nothing_is_loaded_from_elsewhere() -> None:
    text = page.render(sample())
    assert not re.search(r"https?:|\bfile:|//\w+\.", text)
    assert not re.search(r"\b(src|href|srcset|action|data)\s*=", text)
    assert not re.search(r"@import|\burl\((?!#)|\bfetch\(|XMLHttpRequest|\bimport\b", text)
    assert "default-src 'none'" in text, "the browser refuses whatever this test overlooks"


def test_strings_cannot_end_the_elements_they_are_in() -> None:
    plain, text = page.render(sample()), page.render(hostile())
    for tag in ("<script", "</script", "<!--", "</title", "<style"):
        assert text.lower().count(tag) == plain.lower().count(tag), tag
    assert html.escape(hostile()["title"]) in text, "fields in a value are not filled in"
    assert "\u2028" not in text and "\u2029" not in text


def test_every_field_of_the_template_is_filled_in() -> None:
    assert not re.search(r"\{\{\w+\}\}", page.render(sample()))


def test_a_failed_write_leaves_the_old_page(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "timeline.html"
    path.write_text("old")
    values = sample()
    values["bound_s"] = float("nan")
    with pytest.raises(ValueError, match="JSON"):
        page.write(values, path)
    assert path.read_text() == "old"
    page.write(sample(), path)
    assert [p.name for p in tmp_path.iterdir()] == ["timeline.html"]


@needs_browser
@pytest.mark.parametrize("values", [sample(), hostile()], ids=["plain", "hostile"])
def test_a_browser_draws_every_method(values: dict[str, Any], tmp_path: pathlib.Path) -> None:
    page.write(values, tmp_path / "timeline.html")
    dom = dumped(tmp_path / "timeline.html", "#all.measured")
    dom = re.sub(r"<script\b.*?</script>", "", dom, flags=re.S)
    assert dom.count("alert(1)") == dom.count("&lt;script&gt;alert(1)")
    assert len(re.findall(r'<input type="radio" name="method"', dom)) == 3, "two, and all of them"
    for k, method in enumerate(values["methods"]):
        shown = method["views"].get("measured") or method["views"]["predicted"]
        things = sum(
            len(device[kind])
            for device in shown["devices"]
            for kind in ("tasks", "exchanges", "idle")
        )
        lanes = dom.split(f'id="chart{k}"')[1].split("</section>")[0]
        epilogues = len(shown["devices"])
        assert boxes(lanes) == things + epilogues, "each thing, and an epilogue on each device"
        assert lanes.count('class="band"') == len(shown["devices"])
        for look in ("F", "B", "EF", "EB", "pp_warmup", "pp_other", "pp_cooldown", "epilogue"):
            assert re.search(rf'<path class="{look}( thin)?" d="M', lanes), look
        assert ">F0</text>" in lanes and ">device 1</text>" in lanes
