"""The report folder of a bench: table, JSON, trace and timeline page."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

from optimus_jax import report
from optimus_jax.config import Config
from optimus_jax.files import replace_text
from optimus_jax.measure import contest
from optimus_jax.measure.contest import Contest
from optimus_jax.measure.rounds import Spread, ratio
from optimus_jax.plan.plan import BALANCED, Plan
from optimus_jax.schedule.program import Payload
from optimus_jax.schedule.simulate import Durations
from optimus_jax.tables import table_text
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
    before = done.profile.reference.median
    plan = dataclasses.asdict(config.parallel)
    del plan["method"]  # all of them ran
    return {
        "emulated": done.emulated,
        "rounds": len(next(iter(done.times.values()))),
        "plan": plan,
        "methods": {
            name: {
                "measured_s": spread.median,
                "iqr_s": spread.iqr,
                "share_of_text_only": text.median / spread.median if text else None,
                **_predicted(
                    done.plans.get(name),
                    spread.median,
                    done.profile_of(name).reference.median
                    * ratio(done.times[name], done.reference).median,
                ),
            }
            for name, spread in spreads.items()
        },
        "ratios": {name: spread.median for name, spread in pairs.items()},
        "ratio_iqrs": {name: spread.iqr for name, spread in pairs.items()},
        "costs": {
            **contest.work(durations, config),
            "exchange": durations.transfer,
            **_exchanges(config, durations),
            "epilogue": durations.epilogue,
        },
        "bound_s": contest.bound_s(config, durations),
        "phased_formula_s": contest.phased_s(config, durations),
        "slower_than_profiled": Spread.of(t / before for t in done.reference).median,
        "where": done.profile.where,
        "times": done.times,
    }


def _exchanges(config: Config, durations: Durations) -> dict[str, float]:
    """Seconds of exchanges of features and, where an encoder has several stages, of hidden states;
    of encoders after the first under their names too."""
    found = {}
    for k, name in enumerate(config.model.encoders):
        suffix = f"_{name}" if k else ""
        found[f"feature_exchange{suffix}"] = durations.travel(Payload("feature", k))
        if config.pipeline.encoders[k].stages > 1:
            found[f"hidden_exchange{suffix}"] = durations.travel(Payload("hidden", k))
    return found


def _predicted(plan: Plan | None, measured: float, as_profiled: float) -> dict[str, Any]:
    """What was predicted of a method; nothing of one that is not a Program. `as_profiled` is what
    was measured, at the speed that the machine had when costs were taken: each round's step beside
    the same round's reference probe."""
    if plan is None:
        return {"predicted_s": None, "error": None}
    bubbles = plan.bubbles
    return {
        "predicted_s": plan.step_s,
        "error": measured / plan.step_s - 1,
        "error_as_profiled": as_profiled / plan.step_s - 1,
        "program_s": plan.program_s,
        "event_driven_s": plan.event_driven_s,
        "share_filled": bubbles.share_filled,
        "inside_share": bubbles.inside_share,
        "time_share": bubbles.time_share,
        "llm_layers": plan.pipeline.llm_layers,
        "encoder_layers": [encoder.layers for encoder in plan.pipeline.encoders],
        "schedule": str(plan.schedule),
    }


LAYERS = ("llm_layers", "encoder_layers")


def summary(values: dict[str, Any]) -> dict[str, Any]:
    """The JSON line of a bench."""
    short = {name: value for name, value in values.items() if name != "times"}
    methods = {
        name: {k: v for k, v in of.items() if k not in ("schedule", *LAYERS)}
        for name, of in values["methods"].items()
    }
    return {**short, "methods": methods}


def write(workdir: pathlib.Path, done: Contest, values: dict[str, Any]) -> pathlib.Path:
    """Writes report.json, report.txt, profile.json, trace.json and timeline.html, and the profiles
    of methods that have their own; says where."""
    where = report.folder(workdir)
    where.mkdir(parents=True, exist_ok=True)
    replace_text(where / "report.json", json.dumps(values, indent=2) + "\n")
    replace_text(where / "report.txt", text(values) + "\n")
    done.profile.save(where / "profile.json")
    for name, own in done.own.items():
        own.save(where / f"profile_{name}.json")
    shown = timeline(workdir.name, done, values)
    page.write(shown, where / "timeline.html")
    chrome.write(shown, where / "trace.json")
    return where


def timeline(title: str, done: Contest, values: dict[str, Any]) -> dict[str, Any]:
    """What the timeline page shows."""
    methods = []
    for name, plan in done.plans.items():
        marks, found = done.marks.get(name), values["methods"][name]
        seen = view.measured(plan.program, marks.devices, marks.end) if marks else None
        methods.append(view.of_method(name, plan, found["measured_s"], found["iqr_s"], seen))
    return {
        "title": f"{title}: {report.plan_words(values['plan'])}",
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


def _machine(values: dict[str, Any]) -> str:
    where = values["where"]
    return f"{where['devices']} x {where['processor']}, jax {where['jax']}"


def text(values: dict[str, Any]) -> str:
    """The report as a person reads it on a terminal."""
    kind = "emulated" if values["emulated"] else "measured"
    header = ("method", f"{kind}, ms", "IQR", "predicted", "off by", "drift apart")
    table = table_text(
        (*header, "phased / it", "of text_only", "bubbles filled", "encoder spared"),
        [_row(values, name, m) for name, m in values["methods"].items()],
    )
    costs = values["costs"]
    words = ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in costs.items())
    formula, slower = values["phased_formula_s"], values["slower_than_profiled"]
    lines = [
        f"{report.plan_words(values['plan'])}; {values['rounds']} rounds; {_machine(values)}",
        f"costs in ms, measured before the rounds: {words}",
        "",
        table,
        "",
        f"no placement of the encoder can take less than {1e3 * values['bound_s']:.1f} ms (bound)",
        f"in the rounds, one and the same task took {slower:.3f} of its time"
        " when costs were measured; 'drift apart' is how far off predictions are without that",
    ]
    if formula and "phased" in values["methods"]:
        off = values["methods"]["phased"]["measured_s"] / formula - 1
        lines.append(
            f"phased by its formula, text_only + M (e + e_b) / P + epilogue: {1e3 * formula:.1f} ms"
            f" ({off:+.1%})"
        )
    if balanced := values["methods"].get(BALANCED):
        split = [
            ",".join(map(str, layers))
            for layers in (*balanced["encoder_layers"], balanced["llm_layers"])
        ]
        lines.append(f"{BALANCED} has {split[0]} encoder and {split[1]} LLM layers in its stages")
    return "\n".join(lines)


def _row(values: dict[str, Any], name: str, m: dict[str, Any]) -> tuple[str, ...]:
    """A method's line of the table."""
    against = values["ratios"].get(f"phased/{name}")
    share, planned = m["share_of_text_only"], m["predicted_s"] is not None
    encoder = planned and name != "text_only"
    return (
        name,
        f"{1e3 * m['measured_s']:.1f}",
        f"{1e3 * m['iqr_s']:.1f}",
        f"{1e3 * m['predicted_s']:.1f}" if planned else "",
        f"{m['error']:+.1%}" if planned else "",
        f"{m['error_as_profiled']:+.1%}" if planned else "",
        f"{against:.3f}" if against else "",
        f"{share:.1%}" if share else "",
        f"{m['share_filled']:.0%}" if encoder else "",
        f"{m['time_share']:.0%}" if encoder else "",
    )
