"""python -m optimus_jax.concept_pictures [FOLDER]: the pictures of docs/concepts.md.

What they show is computed by the code that they explain: the simulated step of a small job, the
grid that LLM and encoder share, and the Program of a schedule. FOLDER is docs/ if not given.
"""

from __future__ import annotations

import math
import pathlib
import sys
from typing import Any, NamedTuple

from optimus_jax.fill.backbone import Backbone, ChunkPass, Interval, backbone
from optimus_jax.parallel.mesh import Axes, EncoderGrid, Grid
from optimus_jax.picture import STYLES
from optimus_jax.plan.rank_views import CAUSES, Work, view
from optimus_jax.schedule.action_orders import one_f_one_b
from optimus_jax.schedule.dataflow import Content, Dataflow
from optimus_jax.schedule.exchange import place_exchanges
from optimus_jax.schedule.lower import lower, to_ticks
from optimus_jax.schedule.methods import schedule
from optimus_jax.schedule.simulate import Durations
from optimus_jax.schedule.task import Kind, Pipeline, Schedule

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "docs"
WIDTH, DPI = 9.0, 160  # inches: at 900 pixels of a page, an inch has 100
SMALL, TEXT = 9.5, 10.5  # points

# Bubbles: 4 stages of one LLM layer, 4 microbatches, times in units of that layer's forward compute
STAGES, MICROBATCHES = 4, 4
COLLECTIVE, GATHER, SCATTER = 0.12, 0.9, 1.2
ENCODER = {"F": 0.9, "B": 1.8}  # the whole encoder, in the first stage
KINDS = {  # of bubbles: words and colour
    "dp": ("data-parallel: gathering weights, scattering gradients", "#54278f"),
    "pp": ("pipeline: warm-up, between tasks, cool-down", "#d9d9d9"),
    "tp": ("tensor-parallel: four collectives in each layer", "#cb181d"),
    "encoder": ("encoder in the first stage: the others wait for it", "#ffd92f"),
}


def step(encoder: bool) -> tuple[Backbone, dict[str, Any]]:
    """The simulated step, the encoder in the first stage or not there, and its idle time by rank
    (rank_views.view)."""

    def layer(kind: str, stage: int) -> ChunkPass:
        compute = 0.5 if kind == "F" else 1.0  # each of attention and MLP, a backward twice that
        half = (COLLECTIVE, True), (compute, False), (COLLECTIVE, True)
        pieces = half + half
        if encoder and stage == 0:
            own = ((ENCODER[kind], False),)
            pieces = own + pieces if kind == "F" else pieces + own
        return ChunkPass(pieces)

    found = backbone(
        one_f_one_b(STAGES, MICROBATCHES),
        range(STAGES),
        {kind: [layer(kind, stage) for stage in range(STAGES)] for kind in "FB"},
        all_gather=GATHER,
        reduce_scatter=SCATTER,
    )
    runs = encoder_runs(found) if encoder else []
    rows = [[Work("EF", (run,), inside=True) for run in runs], *[[] for _ in range(STAGES - 1)]]
    return found, view(found, 1, 0.0, 0.0, 1, rows)


def encoder_runs(found: Backbone) -> list[Interval]:
    """When the first stage runs encoder layers: first in a forward, last in a backward."""
    return [
        (start, start + ENCODER["F"]) if action.kind == "F" else (end - ENCODER["B"], end)
        for start, end, action in found.passes[0]
    ]


def idle(encoder: bool) -> list[list[tuple[str, float, float]]]:
    """By rank, bubbles as (kind, start, end) from the begin of the step. Of a pipeline bubble, what
    lies beside encoder layers of the first stage is the encoder's."""
    found, seen = step(encoder)
    shift = found.all_gather
    busy = [(s + shift, e + shift) for s, e in encoder_runs(found)] if encoder else []
    rows = []
    for rank, device in enumerate(seen["devices"]):
        row: list[tuple[str, float, float]] = []
        for entry in device["idle"]:
            assert entry["cause"] in CAUSES
            kind = entry["cause"].partition("_")[0]
            row.append((kind, entry["start"], entry["end"]))
            if kind == "pp":
                cut = ((max(s, entry["start"]), min(e, entry["end"])) for s, e in busy)
                row += [("encoder", s, e) for s, e in cut if e > s]
        row += [("tp", s + shift, e + shift) for s, e in found.slots[rank]]
        rows.append(row)
    return rows


def bubbles(plt: Any) -> Any:
    """The four kinds of bubbles: the LLM alone, and with the encoder in its first stage."""
    figure, both = plt.subplots(2, 1, figsize=(WIDTH, 6.6), sharex=True, layout="constrained")
    titles = "The LLM alone", "The same LLM with the encoder in stage 0"
    for axes, encoder, title in zip(both, (False, True), titles, strict=True):
        found, _ = step(encoder)
        for rank, (passes, gaps) in enumerate(zip(found.passes, idle(encoder), strict=True)):
            for start, end, action in passes:
                colour, _ = STYLES[Kind(action.kind)]
                at = start + found.all_gather
                _bar(axes, at, end - start, rank, colour)
                inside = encoder and rank == 0
                own = ENCODER[action.kind] if inside else 0.0
                middle = at + (own if action.kind == "F" else 0.0) + (end - start - own) / 2
                _word(axes, middle, rank, f"{action.kind}{action.microbatch}")
            for kind, start, end in gaps:
                _bar(axes, start, end - start, rank, KINDS[kind][1], edge=kind != "tp")
        for start, end in encoder_runs(found) if encoder else ():
            at = start + found.all_gather
            kind = Kind.EF if end - start < ENCODER["B"] - 1e-9 else Kind.EB
            _bar(axes, at, end - start, 0, *STYLES[kind])
        axes.set_yticks(range(STAGES), [f"stage {rank}" for rank in range(STAGES)], fontsize=TEXT)
        axes.set_ylim(STAGES - 0.45, -0.55)
        axes.set_title(f"{title}: a step takes {found.step:.1f}", fontsize=TEXT + 1, loc="left")
        axes.tick_params(labelsize=SMALL)
        axes.spines[["top", "right"]].set_visible(False)
    both[1].set_xlim(0, step(True)[0].step)
    both[1].set_xlabel("time; a layer's forward computes for 1, its backward for 2", fontsize=TEXT)
    styles = [(k.words, *STYLES[k]) for k in (Kind.F, Kind.B, Kind.EF, Kind.EB)]
    styles += [(f"bubble, {words}", colour, "") for words, colour in KINDS.values()]
    handles = [
        plt.Rectangle((0, 0), 1, 1, facecolor=c, hatch=h, edgecolor="white", label=w)
        for w, c, h in styles
    ]
    figure.legend(handles=handles, ncols=2, loc="outside lower center", fontsize=SMALL)
    return figure


def _bar(
    axes: Any, at: float, long: float, row: float, colour: str, hatch: str = "", edge: bool = True
) -> None:
    look = {"facecolor": colour, "edgecolor": "white", "hatch": hatch}
    axes.barh(row, long, left=at, height=0.76, linewidth=0.8 if edge else 0.0, **look)


def _word(axes: Any, x: float, y: float, text: str) -> None:
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
    axes.text(x, y, text, ha="center", va="center", fontsize=SMALL, zorder=5, bbox=box)


class Rank(NamedTuple):
    """Where a device stands in one module's own plan."""

    replica: int
    stage: int
    shard: int


GRID = Grid(dp=1, pp=4, tp=2, encoders=(EncoderGrid("vit", pp=2, tp=1),))


def ranks(grid: Grid) -> list[tuple[Rank, Rank]]:
    """Of each device, in order: its place in the LLM's plan and in the first encoder's."""

    def flat(place: dict[str, int], axes: Axes) -> int:
        number = 0
        for axis in axes:
            number = number * grid.shape[axis] + place[axis]
        return number

    found = []
    for device in range(grid.size):
        place, rest = {}, device
        for axis in reversed(grid.axes):
            rest, place[axis] = divmod(rest, grid.shape[axis])
        own = (grid.replicas_of(0), grid.stages_of(0), grid.shards_of(0))
        llm = (("dp",), grid.pipe, grid.tensor)
        found.append(tuple(Rank(*(flat(place, axes) for axes in three)) for three in (llm, own)))
    return found


def plans(plt: Any) -> Any:
    """Eight devices, each with a part of the LLM and a part of the encoder."""
    grid, encoder = GRID, GRID.encoders[0]
    columns = grid.pp
    figure, axes = plt.subplots(figsize=(WIDTH, 4.5), layout="constrained")
    blues = "#deebf7", "#9ecae1", "#6baed6", "#4292c6"
    oranges = "#feedde", "#fdbe85", "#fd8d3c", "#f16913"
    for device, (llm, own) in enumerate(ranks(grid)):
        x, y = divmod(device, grid.size // columns)
        axes.add_patch(plt.Rectangle((x, y), 0.94, 0.94, facecolor="none", edgecolor="#444444"))
        axes.text(x + 0.05, y + 0.12, f"device {device}", va="center", fontsize=TEXT, weight="bold")
        for low, colour, head, rank in (
            (0.22, blues[llm.stage], "LLM", llm),
            (0.59, oranges[own.replica], "encoder", own),
        ):
            box = plt.Rectangle((x + 0.03, y + low), 0.88, 0.33, facecolor=colour)
            axes.add_patch(box)
            lines = f"{head}: stage {rank.stage}\nreplica {rank.replica}, shard {rank.shard}"
            axes.text(x + 0.47, y + low + 0.165, lines, ha="center", va="center", fontsize=TEXT)
    copies = grid.size // (encoder.pp * encoder.tp)
    axes.set_title(
        f"LLM: dp {grid.dp}, pp {grid.pp}, tp {grid.tp} (a blue for each stage)\n"
        f"encoder: dp {copies}, pp {encoder.pp}, tp {encoder.tp} (an orange for each replica)",
        fontsize=TEXT + 1,
        loc="left",
    )
    axes.set_xlim(-0.02, columns)
    axes.set_ylim(grid.size // columns, -0.02)
    axes.axis("off")
    return figure


SHORT = {
    Content.ACTIVATION: "activation {i}",
    Content.GRADIENT: "gradient {i}",
    Content.FEATURE: "features {i}.{place}",
    Content.FEATURE_GRADIENT: "features' gradient {i}.{place}",
}


def tick_rows() -> tuple[Schedule, list[tuple[str, str, str]]]:
    """A schedule, and of each tick of its Program the task of device 0, what is exchanged after it
    and the task of device 1."""
    pipe = Pipeline(2, 4)
    durations = Durations.uniform(pipe)
    made = schedule("filled", "1f1b", pipe, durations)
    program, producer = lower(made, durations), Dataflow.of(made).producer
    layout = to_ticks(place_exchanges(made, durations), durations)
    rows = []
    for tick in range(program.used_ticks):
        tasks = [program.task(tick, device) for device in range(pipe.stages)]
        words = []
        for value in layout.ticks[tick].links.get((0, 1), ()):
            name = SHORT[value.content].format(i=value.microbatch, place=value.place)
            words.append(f"{name} →" if producer[value][0] == 0 else f"← {name}")
        assert bool(words) == bool(program.pattern[tick])
        left, right = ("" if task is None else str(task) for task in tasks)
        rows.append((left, "   ".join(words), right))
    return made, rows


def ticks(plt: Any) -> Any:
    """A schedule in its notation and, below it, the ticks of its Program."""
    made, rows = tick_rows()
    head, line = 3.4, 0.25  # rows above the table; inches of a row
    figure, axes = plt.subplots(figsize=(WIDTH, line * (len(rows) + head + 0.8)))
    figure.subplots_adjust(0.01, 0.01, 0.99, 0.99)
    for device, text in enumerate(str(made).splitlines()):
        axes.text(0.0, 0.6 + device, text, va="center", fontsize=SMALL, family="monospace")
    places = (("tick", 0.04), ("device 0", 0.16), ("exchange after it", 0.54), ("device 1", 0.92))
    for word, x in places:
        axes.text(x, head - 0.6, word, ha="center", va="center", fontsize=TEXT, weight="bold")
    for tick, (left, moved, right) in enumerate(rows):
        y = head + tick + 0.5
        axes.text(places[0][1], y, str(tick), ha="center", va="center", fontsize=SMALL)
        for text, x in ((left, places[1][1]), (right, places[3][1])):
            kind = Kind(text.rstrip("0123456789.c")) if text else None
            colour, hatch = STYLES[kind] if kind else ("#f2f2f2", "")
            box = plt.Rectangle((x - 0.07, y - 0.42), 0.14, 0.84, facecolor=colour, hatch=hatch)
            box.set(edgecolor="white", linewidth=0.8)
            axes.add_patch(box)
            if text:
                _word(axes, x, y, text)
        if moved:
            axes.plot((0.24, 0.84), (y, y), color="#bbbbbb", linewidth=1, zorder=1)
            _word(axes, places[2][1], y, moved)
    axes.set_xlim(0, 1)
    axes.set_ylim(math.ceil(head) + len(rows), 0)
    axes.axis("off")
    return figure


PICTURES = {"bubbles": bubbles, "plans": plans, "ticks": ticks}


def draw(folder: pathlib.Path, dpi: int = DPI) -> list[pathlib.Path]:
    """Draws all pictures into a folder, as NAME.png on white, which a dark page needs too."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    written = []
    for name, picture in PICTURES.items():
        figure = picture(plt)
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1], dpi=dpi, facecolor="white", metadata={"Software": None})
        plt.close(figure)
    return written


def main() -> None:
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    for path in draw(folder):
        print(path)


if __name__ == "__main__":
    main()
