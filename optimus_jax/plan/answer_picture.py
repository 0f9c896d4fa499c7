"""A planner's answer as a picture: the ranks of one LLM pipeline, unfilled and filled."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

from optimus_jax.picture import STYLES
from optimus_jax.schedule.task import Kind

LLM = {kind: STYLES[kind][0] for kind in (Kind.F, Kind.B)}
# darker than in a training run's timeline, and not hatched: slices of a kernel are a pixel wide
ENCODER = {Kind.EF: "#fdae6b", Kind.EB: "#d94801"}
COLOURS = {str(kind): colour for kind, colour in (LLM | ENCODER).items()}
COLOURS |= {"I": COLOURS["B"], "W": "#6a51a3"}  # of backwards split in two
BESIDE = ("phased", "text_only")  # what the recommended method is set beside: the first there is

Bars = dict[str, list[tuple[float, float]]]


def write(timeline: dict[str, Any], path: pathlib.Path) -> None:
    """Draws the recommended method below the one that fills nothing, on one scale, into a PNG.

    `timeline` is what answer_page.timeline makes.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    shown = chosen(timeline)
    ranks = timeline["devices"]
    figure, panels = plt.subplots(
        len(shown),
        1,
        figsize=(13, 1.2 + len(shown) * (0.9 + 0.3 * ranks)),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for axes, method in zip(panels[:, 0], shown, strict=True):
        seen = method["views"]["simulated"]
        for rank in range(ranks):
            axes.axhspan(rank - 0.42, rank + 0.42, color="#ececec", zorder=0)
            for kind, spans in bars(timeline, seen, rank).items():
                beside = kind.startswith("E")
                axes.broken_barh(
                    spans,
                    (rank if beside else rank - 0.42, 0.42),
                    facecolor=COLOURS[kind],
                    linewidth=0,
                    zorder=2,
                )
        axes.set_ylim(ranks - 0.5, -0.5)
        axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], fontsize=10)
        axes.set_title(f"{method['name']}: {seen['end_s']:.3f} s a step, simulated", loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlim(0, max(one["views"]["simulated"]["end_s"] for one in shown))
    panels[-1, 0].set_xlabel("seconds")
    figure.suptitle(timeline["title"], fontsize=13)
    kinds = LLM | ENCODER
    handles = [Patch(facecolor=colour, label=kind.words) for kind, colour in kinds.items()]
    handles.append(Patch(facecolor="#ececec", label="idle"))
    figure.legend(handles=handles, ncols=5, loc="outside lower center", frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def chosen(timeline: dict[str, Any]) -> list[dict[str, Any]]:
    """The methods to draw: one that fills nothing, then the recommended one."""
    methods = {one["name"]: one for one in timeline["methods"]}
    names = [name for name in BESIDE if name in methods][:1]
    recommended = timeline["cluster"]["recommended"]
    return [methods[name] for name in dict.fromkeys([*names, recommended])]


def bars(timeline: dict[str, Any], seen: dict[str, Any], rank: int) -> Bars:
    """(start, seconds) of a rank's LLM passes and encoder work, by kind."""
    found: Bars = {}
    if seen.get("backbone") is not None:
        shift = seen["shift_s"]
        for one in timeline["backbones"][seen["backbone"]]["devices"][rank]:
            span = one["start"] + shift, one["end"] - one["start"]
            found.setdefault(one["kind"], []).append(span)
    for one in seen["devices"][rank]["encoder"]:
        found.setdefault(one["kind"], []).extend(_runs(one))
    return found


def _runs(work: dict[str, Any]) -> Iterator[tuple[float, float]]:
    """The intervals of a piece of encoder work; `in_slots` are runs and waits in turn."""
    if "in_slots" not in work:
        yield work["start"], work["end"] - work["start"]
        return
    clock = work["start"]
    for n, micro in enumerate(work["in_slots"]):
        if n % 2 == 0:
            yield clock, micro / 1e6
        clock += micro / 1e6
