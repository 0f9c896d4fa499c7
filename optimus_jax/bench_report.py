"""The report folder of a bench: table, JSON, trace and timeline page."""

from __future__ import annotations

import io
import json
import pathlib
from typing import Any

from optimus_jax import report
from optimus_jax.measure import contest
from optimus_jax.measure.contest import Contest
from optimus_jax.measure.rounds import Spread, ratio
from optimus_jax.plan.plan import Plan
from optimus_jax.schedule.methods import MEANINGS
from optimus_jax.timeline import chrome, page, view


def values(done: Contest) -> dict[str, Any]:
    """All figures of a bench, as JSON values; seconds. `ratios` are medians of the ratios within
    each round, `ratio_iqrs` their interquartile ranges."""
    config, durations = done.config, done.durations
    spreads = {name: Spread.of(times) for name, times in done.times.items()}
    pairs = {
        f"{a}/{b}": ratio(done.times[a], done.times[b])
        for b in done.times
        for a in done.times
        if a != b
    }
    text = spreads.get("text_only")
    return {
        "method": "bench",
        "emulated": done.emulated,
        "rounds": len(next(iter(done.times.values()))),
        "plan": {
            "pp": config.parallel.pp,
            "dp": config.parallel.dp,
            "chunks": config.parallel.chunks,
            "microbatches": config.parallel.microbatches,
            "order": config.parallel.order,
        },
        "methods": {
            name: {
                "measured_s": spread.median,
                "iqr_s": spread.iqr,
                "share_of_text_only": text.median / spread.median if text else None,
                **_predicted(done.plans.get(name), spread.median),
            }
            for name, spread in spreads.items()
        },
        "ratios": {name: spread.median for name, spread in pairs.items()},
        "ratio_iqrs": {name: spread.iqr for name, spread in pairs.items()},
        "costs": {
            **contest.work(durations, config),
            "exchange": durations.travel(False),
            "feature_exchange": durations.travel(True),
            "epilogue": durations.epilogue,
        },
        "bound_s": contest.bound_s(config, durations),
        "phased_formula_s": contest.phased_s(config, durations),
        "where": done.profile.where,
        "times": done.times,
    }


def _predicted(plan: Plan | None, measured: float) -> dict[str, Any]:
    """What was predicted of a method; nothing of one that is not a Program."""
    if plan is None:
        return {"predicted_s": None, "error": None}
    bubbles = plan.bubbles
    return {
        "predicted_s": plan.step_s,
        "error": measured / plan.step_s - 1,
        "program_s": plan.program_s,
        "event_driven_s": plan.event_driven_s,
        "share_filled": bubbles.share_filled,
        "inside_share": bubbles.inside_share,
        "time_share": bubbles.time_share,
        "schedule": str(plan.schedule),
    }


def summary(values: dict[str, Any]) -> dict[str, Any]:
    """The JSON line of a bench."""
    dropped = {"times", "method"}
    short = {name: value for name, value in values.items() if name not in dropped}
    methods = {
        name: {k: v for k, v in of.items() if k != "schedule"}
        for name, of in values["methods"].items()
    }
    return {**short, "methods": methods}


def write(workdir: pathlib.Path, done: Contest, values: dict[str, Any]) -> pathlib.Path:
    """Writes report.json, report.txt, profile.json, trace.json and timeline.html; says where."""
    where = report.folder(workdir)
    where.mkdir(parents=True, exist_ok=True)
    (where / "report.json").write_text(json.dumps(values, indent=2) + "\n")
    (where / "report.txt").write_text(text(values) + "\n")
    done.profile.save(where / "profile.json")
    shown = timeline(workdir.name, done, values)
    page.write(shown, where / "timeline.html")
    chrome.write(shown, where / "trace.json")
    return where


def timeline(title: str, done: Contest, values: dict[str, Any]) -> dict[str, Any]:
    """What the timeline page shows."""
    methods = []
    for name, plan in done.plans.items():
        views = {"predicted": view.predicted(plan)}
        if name in done.marks:
            marks = done.marks[name]
            views["measured"] = view.measured(plan.program, marks.devices, marks.end)
        methods.append(
            {
                "name": name,
                "meaning": MEANINGS[name],
                "predicted_s": values["methods"][name]["predicted_s"],
                "measured_s": values["methods"][name]["measured_s"],
                "iqr_s": values["methods"][name]["iqr_s"],
                "views": views,
            }
        )
    return {
        "title": f"{title}: {_plan_words(values)}",
        "notes": [
            "Predicted: simulated from costs of single tasks, measured before the methods ran.",
            f"Measured steps: medians of {values['rounds']} rounds in which the methods took turns."
            " The measured timeline is one further step that notes its own times: of a few, the one"
            " nearest to the median.",
            f"Ran on {_machine(values)}.",
        ],
        "emulated": done.emulated,
        "devices": len(next(iter(methods))["views"]["predicted"]["devices"]),
        "bound_s": values["bound_s"],
        "methods": methods,
    }


def _plan_words(values: dict[str, Any]) -> str:
    plan = values["plan"]
    chunks = f", {plan['chunks']} chunks each" if plan["chunks"] > 1 else ""
    return f"{plan['pp']} pipeline stages{chunks}, {plan['microbatches']} microbatches"


def _machine(values: dict[str, Any]) -> str:
    where = values["where"]
    return f"{where['devices']} x {where['processor']}, jax {where['jax']}"


def text(values: dict[str, Any]) -> str:
    """The report as a person reads it on a terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table

    kind = "emulated" if values["emulated"] else "measured"
    table = Table(
        Column("method", no_wrap=True, min_width=13),
        *(f"{kind}, ms", "IQR", "predicted", "off by", "phased / it", "of text_only"),
        *("bubbles filled", "encoder spared"),
        box=box.SIMPLE_HEAD,
    )
    for name, m in values["methods"].items():
        against = values["ratios"].get(f"phased/{name}")
        share, planned = m["share_of_text_only"], m["predicted_s"] is not None
        encoder = planned and name != "text_only"
        table.add_row(
            name,
            f"{1e3 * m['measured_s']:.1f}",
            f"{1e3 * m['iqr_s']:.1f}",
            f"{1e3 * m['predicted_s']:.1f}" if planned else "",
            f"{m['error']:+.1%}" if planned else "",
            f"{against:.3f}" if against else "",
            f"{share:.1%}" if share else "",
            f"{m['share_filled']:.0%}" if encoder else "",
            f"{m['time_share']:.0%}" if encoder else "",
        )
    for column in table.columns[1:]:
        column.justify = "right"
    console = Console(width=110, record=True, file=io.StringIO(), color_system=None)
    console.print(table)
    costs = values["costs"]
    words = ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in costs.items())
    formula = values["phased_formula_s"]
    lines = [
        f"{_plan_words(values)}; {values['rounds']} rounds; {_machine(values)}",
        f"costs in ms, measured before the rounds: {words}",
        "",
        console.export_text().rstrip(),
        "",
        f"no placement of the encoder can take less than {1e3 * values['bound_s']:.1f} ms (bound)",
    ]
    if formula and "phased" in values["methods"]:
        off = values["methods"]["phased"]["measured_s"] / formula - 1
        lines.append(
            f"phased by its formula, text_only + M (e + e_b) / m + epilogue: {1e3 * formula:.1f} ms"
            f" ({off:+.1%})"
        )
    return "\n".join(lines)
