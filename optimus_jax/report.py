"""The report folder of a run: predicted bubbles by cause, the timeline, the measured step."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from optimus_jax.config import Config
from optimus_jax.files import replace_text
from optimus_jax.metrics import Stopwatch
from optimus_jax.plan.plan import Plan
from optimus_jax.schedule.bubbles import CAUSE_WORDS
from optimus_jax.schedule.visualize import text_grid
from optimus_jax.tables import table_text
from optimus_jax.timeline import view

ACCURACIES = {"digit_accuracy": "digits", "caption_accuracy": "captions"}


def folder(workdir: pathlib.Path) -> pathlib.Path:
    return workdir / "report"


def predicted(config: Config, plan: Plan) -> dict[str, Any]:
    """What a plan predicts, as JSON values. Times in seconds, bubbles summed over devices."""
    b = plan.bubbles
    return {
        "method": config.parallel.method,
        "order": config.parallel.order,
        "costs": plan.costs.source,
        "predicted_step_s": plan.step_s,
        "program_s": plan.program_s,
        "event_driven_s": plan.event_driven_s,
        "text_only_step_s": b.alone_step + plan.durations.epilogue,
        "epilogue_s": plan.durations.epilogue,
        "ticks": plan.program.used_ticks,
        "slots": {
            **dataclasses.asdict(plan.program.slots),
            "encoders": [dataclasses.asdict(slots) for slots in plan.program.slots.encoders],
        },
        "bubbles": {name: dataclasses.asdict(bubble) for name, bubble in b.causes.items()},
        "share_filled": b.share_filled,
        "inside_share": b.inside_share,
        "time_share": b.time_share,
    }


def write(
    workdir: pathlib.Path,
    config: Config,
    plan: Plan,
    watch: Stopwatch,
    startup: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes report.json, report.txt, trace.json and the timeline as text, picture and page;
    returns the report's values. `startup` is what Startup.values gives."""
    values = {
        **predicted(config, plan),
        "measured_step_s": watch.median(),
        "measured_quartiles_s": watch.quartiles(),
        "steps_timed": max(0, len(watch.seconds) - watch.SKIPPED),
        "startup": dict(startup or {}),
        "timeline": text_grid(plan.lanes),
    }
    where = folder(workdir)
    where.mkdir(parents=True, exist_ok=True)
    (where / "timeline.txt").write_text(values["timeline"] + "\n")
    draw(where, workdir.name, config, plan, values)
    save(workdir, values)
    return values


def draw(
    where: pathlib.Path, title: str, config: Config, plan: Plan, values: Mapping[str, Any]
) -> None:
    """Writes the timeline as picture and page, and a trace, into a folder that is there. The
    measured step is shown if `values` have one."""
    from optimus_jax import picture
    from optimus_jax.timeline import chrome, page

    picture.timeline(plan, config, where / "timeline.png")
    shown = timeline(title, config, plan, values)
    page.write(shown, where / "timeline.html")
    chrome.write(shown, where / "trace.json")


def timeline(title: str, config: Config, plan: Plan, values: Mapping[str, Any]) -> dict[str, Any]:
    """What the timeline page of a training run shows: its method, and the LLM alone. `values` are
    those of `write`, or of a run that is only planned, those of `predicted`."""
    method = config.parallel.method
    plans = {method: plan, "text_only": plan.llm_alone}
    quartiles, step = values.get("measured_quartiles_s"), values.get("measured_step_s")
    own = step, quartiles[1] - quartiles[0] if quartiles else None
    notes = [f"Predicted: simulated from {plan.costs.source} costs, not measured."]
    if step is not None:
        notes.append(
            f"Measured step: median of {values['steps_timed']} training steps."
            " python -m optimus_jax.bench also measures when each task runs."
        )
    return {
        "title": f"{title}: {plan_words(dataclasses.asdict(config.parallel))}",
        "notes": notes,
        "emulated": False,
        "devices": config.parallel.pp,
        "bound_s": None,
        "methods": [
            view.of_method(name, one, *(own if name == method else (None, None)))
            for name, one in plans.items()
        ],
    }


def plan_words(plan: Mapping[str, Any]) -> str:
    """A plan, as the settings of ParallelConfig by name, in a few words."""
    replicas = f"{plan['dp']} replicas of " if plan["dp"] > 1 else ""
    chunks = f", {plan['chunks']} chunks each" if plan["chunks"] > 1 else ""
    shards = f" x {plan['tp']} tensor shards" if plan["tp"] > 1 else ""
    words = [f"{replicas}{plan['pp']} pipeline stages{shards}{chunks}"]
    for name, own in {"encoder": plan["encoder"], **plan["more_encoders"]}.items():
        if own["pp"] > 1 or own["tp"] > 1:
            stages = f"{own['pp']} stages" if own["pp"] > 1 else ""
            cut = f"{own['tp']} tensor shards" if own["tp"] > 1 else ""
            words.append(f"{name} of {' x '.join(filter(None, (stages, cut)))}")
    return ", ".join([*words, f"{plan['microbatches']} microbatches"])


def save(workdir: pathlib.Path, values: dict[str, Any]) -> None:
    """Whole files or none: a kill leaves the old ones."""
    for name, content in (
        ("report.json", json.dumps(values, indent=2)),
        ("report.txt", text(values)),
    ):
        replace_text(folder(workdir) / name, content + "\n")


def discard(workdir: pathlib.Path) -> None:
    """Removes the report of an earlier run: what it says may not hold for the one that starts."""
    (folder(workdir) / "report.json").unlink(missing_ok=True)


def load(workdir: pathlib.Path) -> dict[str, Any] | None:
    """The report that a training run left in `workdir`, None if there is none."""
    path = folder(workdir) / "report.json"
    return json.loads(path.read_text()) if path.exists() else None


def summary(values: dict[str, Any], loss: float) -> dict[str, Any]:
    """The JSON line of a training run."""
    names = ("measured_step_s", "predicted_step_s", "share_filled", "inside_share", "time_share")
    return {"loss": loss, **{name: values.get(name) for name in names}}


def text(values: dict[str, Any]) -> str:
    """The report as a person reads it on a terminal."""
    columns = ("LLM alone", "encoder there", "filled", "left idle")
    seconds = {
        CAUSE_WORDS[cause]: [bubble[k] for k in ("alone", "encoder", "filled", "left")]
        for cause, bubble in values["bubbles"].items()
    }
    seconds["together"] = [sum(column) for column in zip(*seconds.values(), strict=True)]
    table = table_text(
        ("idle time, one pipeline", *(f"{name}, ms" for name in columns)),
        [(name, *(f"{1e3 * x:.2f}" for x in row)) for name, row in seconds.items()],
    )
    lines = [
        f"Method {values['method']} on {values['order']}; predictions from {values['costs']} costs,"
        " simulated, not measured",
        "",
        table,
        "",
        f"encoder time that the step is spared    {values['time_share']:6.1%}",
        f"encoder work inside the LLM's idle time {values['inside_share']:6.1%}",
        f"share of the LLM's idle time filled     {values['share_filled']:6.1%}",
        "",
        f"predicted step   {1e3 * values['predicted_step_s']:8.2f} ms"
        f"   (LLM alone {1e3 * values['text_only_step_s']:.2f} ms)",
    ]
    if values.get("measured_step_s"):
        low, high = values.get("measured_quartiles_s") or (values["measured_step_s"],) * 2
        lines.append(
            f"measured step    {1e3 * values['measured_step_s']:8.2f} ms"
            f"   (quartiles {1e3 * low:.2f} to {1e3 * high:.2f} ms,"
            f" {values['steps_timed']} steps)"
        )
    for name, what in ACCURACIES.items():
        if name in values:
            lines += [
                "",
                f"{f'held-out {what} read right':39} {values[name]:6.1%}",
                f"  with pictures shuffled                {values['shuffled_accuracy']:6.1%}",
            ]
    if "heldout_loss" in values:
        lines += [
            "",
            f"loss of held-out captions               {values['heldout_loss']:6.3f}"
            " nats for each character",
            f"  with pictures shuffled                {values['shuffled_loss']:6.3f}"
            f"   (standard error of the difference {values['loss_gap_error']:.3f})",
        ]
    return "\n".join([*lines, "", values["timeline"]])
