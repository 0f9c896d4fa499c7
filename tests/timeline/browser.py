"""A browser without a window that draws a timeline page."""

from __future__ import annotations

import html
import json
import pathlib
import re
import shutil
import subprocess
from typing import Any

import pytest

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium or chrome on the PATH to draw the page"
)


def boxes(svg: str) -> int:
    """How many boxes the paths of a timeline have."""
    looks = r"E?[FB]|pp_\w+|dp_\w+|tp|epilogue|collective|mark"
    paths = re.findall(rf'<path class="(?:{looks})(?: \w+)*" d="([^"]*)"', svg)
    return sum(path.count("M") for path in paths)


def answers(path: pathlib.Path, questions: str, place: str) -> list[Any]:
    """What a script finds that runs in the page after the page's own: it fills `found`."""
    text = path.read_text(encoding="utf-8")
    script = f"""<script>
      const found = [];
      const svg = () => panels[0].div.firstChild.getBoundingClientRect();
      function hover(x, y) {{
        const place = {{ clientX: svg().left + x, clientY: svg().top + y, bubbles: true }};
        panels[0].div.dispatchEvent(new PointerEvent("pointermove", place));
        return at("tip").hidden ? null : [...at("tip").children].map((p) => p.textContent);
      }}
      {{ {questions} }}
      document.body.dataset.found = JSON.stringify(found);
    </script></body>"""
    asked = path.with_name("asked.html")
    asked.write_text(text.replace("</body>", script), encoding="utf-8")
    dom = dumped(asked, place)
    return json.loads(html.unescape(re.findall(r'data-found="([^"]*)"', dom)[0]))


def dumped(path: pathlib.Path, place: str) -> str:
    """The page's elements after its script has run."""
    profile = path.with_suffix(".profile")
    command = [
        *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
        *(f"--user-data-dir={profile}", "--window-size=1280,800"),
        *("--virtual-time-budget=3000", "--dump-dom"),  # timelines beyond the window come later
        f"{path.as_uri()}{place}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout
