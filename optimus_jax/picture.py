"""The timeline as a picture: each device's LLM tasks and, below them, its encoder tasks."""

from __future__ import annotations

import pathlib

from optimus_jax.config import Config
from optimus_jax.plan.plan import Plan
from optimus_jax.schedule.task import Kind

# Told apart without colour too: forward is light, backward dark, encoder hatched.
STYLES = {
    Kind.F: ("#9ecae1", ""),
    Kind.B: ("#2171b5", ""),
    Kind.EF: ("#fdd0a2", "//"),
    Kind.EB: ("#e6550d", "//"),
}


def timeline(plan: Plan, config: Config, path: pathlib.Path) -> None:
    """Draws the plan's predicted timeline into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    devices = len(plan.lanes)
    figure, axes = plt.subplots(figsize=(11, 1.5 + 1.0 * devices), layout="constrained")
    for device, lane in enumerate(plan.lanes):
        axes.axhspan(device - 0.42, device + 0.42, color="#f2f2f2", zorder=0)
        for task, start, end in lane:
            colour, hatch = STYLES[task.kind]
            low = device if task.kind.is_encoder else device - 0.4
            box = axes.broken_barh(
                [(1e3 * start, 1e3 * (end - start))],
                (low, 0.4),
                facecolor=colour,
                edgecolor="white",
                hatch=hatch,
                linewidth=0.8,
            )
            box.set_zorder(2)
            share = (end - start) / plan.program_s
            dark, long = task.kind in (Kind.B, Kind.EB), len(str(task))
            fits = share > max(1 / 35, long / 130)  # letters beside one another, or else below
            if fits or (share > 1 / 80 and long <= 6):
                axes.text(
                    1e3 * (start + end) / 2,
                    low + 0.2,
                    str(task),
                    ha="center",
                    va="center",
                    fontsize=8.5,
                    rotation=0 if fits else 90,
                    color="white" if dark else "black",
                    # no hatching behind letters
                    bbox={"facecolor": colour, "edgecolor": "none", "pad": 0.6},
                    zorder=3,
                    clip_on=True,
                )
    axes.set_yticks(range(devices), [f"device {d}\nLLM | encoder" for d in range(devices)])
    axes.set_ylim(devices - 0.5, -0.5)
    axes.set_xlim(0, 1e3 * plan.program_s)
    axes.set_xlabel("milliseconds, predicted (grey: idle)")
    b = plan.bubbles
    axes.set_title(
        f"{config.parallel.method}: {devices} stages, {config.parallel.microbatches} microbatches;"
        f" {b.share_filled:.0%} of the LLM's idle time filled,"
        f" {b.time_share:.0%} of the encoder's time hidden"
    )
    handles = [Patch(facecolor=c, hatch=h, label=k.words) for k, (c, h) in STYLES.items()]
    axes.legend(
        handles=handles, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.5 / (0.5 + devices))
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
