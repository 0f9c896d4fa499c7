"""docs/paper.md: every figure of the paper's tables beside what the planner finds for its row.

python -m optimus_jax.plan.paper_page > docs/paper.md
"""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Iterable, Sequence

from optimus_jax.plan.answer import answer as answer_to
from optimus_jax.plan.answer_report import memory_overhead
from optimus_jax.plan.cluster_checks import from_config_dict
from optimus_jax.plan.outcome import Answer

# Printed by the paper: seconds of a step (tables 5 and 4), shares in percent (table 7).
STEPS = {
    "strong_1536": {"encoder_first_tuned": 10.65, "balanced": 10.43, "fine": 9.80},
    "strong_2048": {"encoder_first_tuned": 8.26, "balanced": 8.06, "fine": 7.29},
    "strong_3072": {"encoder_first_tuned": 5.91, "balanced": 5.87, "fine": 4.87},
    "small": {"encoder_first_tuned": 3.42, "balanced": 3.04, "fine": 2.78},
}
SHARES = {
    "strong_1536": (34.3, 57.5, 322.2),
    "strong_2048": (45.8, 69.3, 89.6),
    "strong_3072": (68.7, 85.0, 15.1),
}
CALIBRATED_ON = {("strong_1536", "encoder_first_tuned"), ("strong_1536", "fine")}
NAMES = {"encoder_first_tuned": "Megatron-LM", "balanced": "balanced", "fine": "Optimus"}
UP_TO = {
    "weak_a": (1.22, 1.18),
    "weak_b": (1.22, 1.18),
    "weak_c": (1.22, 1.18),
    "weak_d": (1.22, 1.18),
    "dual_11_5": (1.25, None),
    "dual_22_5": (1.26, None),
    "dual_22_11": (1.27, None),
}
BUBBLES = {  # table 1: seconds of a step of 5.12 s
    "dp_all_gather": 0.167,
    "dp_reduce_scatter": 0.458,
    "pp_warmup": 0.291,
    "pp_cooldown": 0.471,
    "pp_other": 0.445,
    "tp": 0.585,
}
BUBBLES_STEP = 5.12
PERCENT = dict(zip(BUBBLES, (3.3, 8.9, 5.0, 9.2, 8.7, 11.2), strict=True))  # as printed


def answers(rows: Iterable[str]) -> dict[str, Answer]:
    """The planner's answers to rows of configs/paper.py."""
    from configs.paper import get_config

    return {row: answer_to(from_config_dict(get_config(row).to_dict())) for row in rows}


def errors(found: dict[str, Answer]) -> dict[tuple[str, str], float]:
    """By row and method, how far the simulated step is off the printed one, of the strong rows."""
    return {
        (row, method): found[row].outcomes[method].step / printed - 1
        for row, methods in STEPS.items()
        if row.startswith("strong")
        for method, printed in methods.items()
    }


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def steps(found: dict[str, Answer]) -> str:
    off, rows = errors(found), []
    for (row, method), error in off.items():
        note = "calibrated on" if (row, method) in CALIBRATED_ON else f"{error:+.1%}"
        step = found[row].outcomes[method].step
        rows.append((row, NAMES[method], f"{STEPS[row][method]:.2f}", f"{step:.2f}", note))
    return table(("row", "paper's method", "printed, s", "simulated, s", "off by"), rows)


def speedups(found: dict[str, Answer]) -> str:
    rows = []
    for row in SHARES:
        for method in ("encoder_first_tuned", "balanced"):
            printed = STEPS[row][method] / STEPS[row]["fine"]
            outcomes = found[row].outcomes
            own = outcomes[method].step / outcomes["fine"].step
            ours = outcomes[method].step / outcomes["filled"].step
            cells = (f"{printed:.3f}", f"{own:.3f}", f"{printed - own:+.3f}", f"{ours:.3f}")
            rows.append((row, NAMES[method], *cells))
    header = ("row", "over", "printed", "fine, simulated", "gap", "filled, simulated")
    return table(header, rows)


def shares(found: dict[str, Answer]) -> str:
    rows = []
    for row, (coarse, fine, seconds) in SHARES.items():
        o = found[row].outcomes
        rows.append(
            (
                row,
                f"{coarse:.1f}",
                f"{100 * (o['coarse'].inside_share or 0):.1f}",
                f"{fine:.1f}",
                f"{100 * (o['fine'].inside_share or 0):.1f}",
                f"{100 * (o['filled'].inside_share or 0):.1f}",
                f"{100 * (o['filled'].time_share or 0):.1f}",
                f"{memory_overhead(found[row], o['fine']):.1%}",
                f"{seconds:.0f}",
                f"{found[row].scheduling_s:.1f}",
            )
        )
    header = (
        "row",
        "coarse, printed",
        "simulated",
        "fine, printed",
        "simulated",
        "filled, inside",
        "filled, by time",
        "memory overhead of fine",
        "paper's search, s",
        "ours, s",
    )
    return table(header, rows)


def every_row(found: dict[str, Answer]) -> str:
    rows = []
    for row, answer in found.items():
        o = answer.outcomes
        cells: list[object] = [row, str(answer.llm.plan)]
        for name in ("encoder_first_tuned", "balanced", "phased", "coarse", "fine", "filled"):
            cells.append(f"{o[name].step:.3f}" if name in o else "-")
        filled = o.get("filled")
        for name in ("encoder_first_tuned", "phased"):
            ratio = f"{o[name].step / filled.step:.3f}" if filled and name in o else "-"
            cells.append(ratio)
        rows.append(cells)
    header = ("row", "LLM plan", "tuned", "balanced", "phased", "coarse", "fine", "filled")
    return table((*header, "tuned / filled", "phased / filled"), rows)


def weak(found: dict[str, Answer]) -> str:
    rows = []
    for row, (megatron, over_balanced) in UP_TO.items():
        o = found[row].outcomes
        own = o["encoder_first_tuned"].step / o["fine"].step
        second = f"{o['balanced'].step / o['fine'].step:.3f}" if "balanced" in o else "-"
        printed = f"{over_balanced:.2f}" if over_balanced else "-"
        rows.append((row, f"{megatron:.2f}", f"{own:.3f}", printed, second))
    header = ("row", "over Megatron-LM, up to", "simulated", "over balanced, up to", "simulated")
    return table(header, rows)


def bubbles(answer: Answer) -> str:
    found, step, rows = answer.llm.backbone.bubbles(), answer.llm.backbone.step, []
    for name, seconds in BUBBLES.items():
        printed, own = 100 * seconds / BUBBLES_STEP, 100 * found[name] / step
        cells = (f"{PERCENT[name]:.1f}", f"{printed:.1f}", f"{own:.1f}")
        rows.append((name, *cells, f"{own - PERCENT[name]:+.1f}"))
    rows.append(("step, s", "5.12", "", f"{step:.2f}", ""))
    header = ("bubble", "printed, %", "its seconds / 5.12, %", "fit, %", "points off printed")
    return table(header, rows)


def page(found: dict[str, Answer]) -> str:
    """The whole page."""
    off = errors(found)
    free = {key: e for key, e in off.items() if key[0] != "strong_1536"}
    sizes = sorted(abs(e) for e in free.values())
    constants = found["strong_1536"].constants
    named = ("efficiency", "p2p_busy_s", "dp_exposed_s")
    small = found["small"].outcomes
    fields = {
        "constants": ", ".join(f"`{name}` {constants[name]:.4g}" for name in named),
        "steps": steps(found),
        "worst": f"{sizes[-1]:.1%}",
        "fifth": f"{sizes[-2]:.1%}",
        "mean": f"{sum(sizes) / len(sizes):.1%}",
        "speedups": speedups(found),
        "shares": shares(found),
        "every": every_row({row: a for row, a in found.items() if row != "bubbles"}),
        "weak": weak(found),
        "small": table(
            ("method", "printed, s", "simulated, s"),
            [
                (NAMES[m], f"{printed:.2f}", f"{small[m].step:.2f}" if m in small else "-")
                for m, printed in STEPS["small"].items()
            ],
        ),
        "small_plan": str(found["small"].llm.plan),
        "bubbles": bubbles(found["bubbles"]),
    }
    text = importlib.resources.files(__package__).joinpath("paper.md.txt").read_text()
    return re.sub(r"\{\{(\w+)\}\}", lambda m: fields[m[1]], text)


def main() -> None:
    from configs.paper import ROWS

    print(page(answers([*ROWS, "bubbles"])), end="")


if __name__ == "__main__":
    main()
