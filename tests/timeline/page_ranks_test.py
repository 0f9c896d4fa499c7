"""timeline.html of a cluster: ranks drawn by a browser, pointed at and zoomed."""

from __future__ import annotations

import pathlib
import re

from optimus_jax.timeline import page
from tests.timeline import ranks
from tests.timeline.browser import answers, boxes, dumped, needs_browser


@needs_browser
def test_a_browser_draws_the_ranks_of_a_cluster(tmp_path: pathlib.Path) -> None:
    page.write(ranks.values(), tmp_path / "timeline.html")
    dom = dumped(tmp_path / "timeline.html", "#all.simulated")
    shown = re.sub(r"<script\b.*?</script>", "", dom, flags=re.S)
    assert '<body class="cluster"' in shown
    assert ">simulated end" in shown and ">predicted end" not in shown
    first, second = (shown.split(f'id="chart{k}"')[1].split("</section>")[0] for k in (0, 1))
    assert ">rank 1</text>" in first and first.count('class="band"') == 2
    # of both ranks two passes, two collectives, two TP slots in one of them; of the first one four
    # idle intervals, two of encoder work and two kernels of it, of the second three idle intervals
    assert boxes(first) == 2 * (2 + 2 + 2) + 4 + 2 + 2 + 3
    assert boxes(second) == 2 * (2 + 2 + 2) + 2 * 3
    for look in ("F", "B", "EF", "EF slots", "tp", "dp_all_gather", "pp_other", "collective"):
        assert re.search(rf'<path class="{look}( thin)?" d="M', first), look
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in shown.split("<tr")]
    table = next(row for row in rows if "<b>1.000</b>" in row)
    figures = ["<b>1.000</b>", "–", "–", "1.250", "100.0&nbsp;%", "100.0&nbsp;%", "40.0&nbsp;%"]
    assert table[-9:] == [*figures, "50.0", "<b>no</b>"]
    shares = ["8.0&nbsp;%", "10.0&nbsp;%", "3.5&nbsp;%", "10.0&nbsp;%", "31.5&nbsp;%"]
    assert shares in rows, "idle time by cause, mean of both ranks"


@needs_browser
def test_pointing_zooming_and_switching(tmp_path: pathlib.Path) -> None:
    page.write(ranks.values(), tmp_path / "timeline.html")
    questions = """
      const x = (t) => {
        const gutter = gutterOf(svg().width), room = svg().width - gutter - RIGHT;
        const [from, to] = [state.from, state.to].map((share) => share * scale(panels[0].m));
        return gutter + (room * (t - from)) / (to - from);
      };
      const top = topOf(panels[0].m);
      const points = [[0.45, 10], [0.22, LANE + 3], [0.17, 10], [0.55, 10], [0.3, LANE + 20]];
      found.push(...points.map(([t, y]) => hover(x(t), top + y)));
      Object.assign(state, { from: 0.14, to: 0.18 });
      draw();
      found.push(panels[0].boxes.length, hover(x(0.16), top + LANE + 3));
      document.getElementById("method_1").click();
      found.push(panels[0].m.name, panels[0].boxes.length);
    """
    told = answers(tmp_path / "timeline.html", questions, "#filled.simulated")
    llm, work, slot, gap, nothing, zoomed, kernel, name, boxes_left = told
    assert llm == [
        "F0c0: LLM forward of microbatch 0, chunk 0",
        "2 TP collectives in it, 70.000\u00a0ms",
        "rank 0, simulated",
        "0.100000 to 0.500000\u00a0s: 400.000\u00a0ms",
    ]
    assert work[:3] == [
        "EF1: encoder forward of microbatch 1",
        "3 kernels in 2 TP slots, 30.000\u00a0ms in all",
        "encoder pipeline 0, stage 1",
    ]
    assert slot[0] == "TP collective 1 of 2 in F0c0"
    assert slot[-1] == "0.150000 to 0.200000\u00a0s: 50.000\u00a0ms"
    assert gap[:2] == [
        "idle: between LLM passes",
        "waits for B0c1 (LLM backward of microbatch 0, chunk 1) on rank 1",
    ]
    assert nothing is None
    # between 0.141 and 0.182 s: a pass and its first slot on both ranks, EF1 and its first kernel
    assert zoomed == 2 * 2 + 2
    assert kernel[-1] == "0.150000 to 0.170000\u00a0s: 20.000\u00a0ms"
    assert (name, boxes_left) == ("text_only", 2 * 2)
