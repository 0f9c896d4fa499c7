"""python -m optimus_jax.plan: what a configuration will do, before anything compiles.

Of a training run: its schedule, idle time and predicted step. Of a cluster's job (a configuration
with `gpus`, such as configs/paper.py): parallel plans of LLM and encoders, all methods side by
side, memory, and which method to use. Everything is simulated.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

from absl import flags

from optimus_jax import command, report
from optimus_jax.files import replace_text
from optimus_jax.plan import answer_page, answer_report
from optimus_jax.plan.answer import answer as answer_to
from optimus_jax.plan.cluster import Cluster
from optimus_jax.plan.execution import KEY, of_plan, written
from optimus_jax.plan.outcome import Answer
from optimus_jax.plan.plan import make_plan
from optimus_jax.plan.realisation import execution_text, execution_values

command.define_config()
command.define_costs()
flags.DEFINE_string(
    "out", None, "Folder for plan.json, the timeline as picture and page, and a trace."
)


def main() -> int:
    job = command.job()
    if isinstance(job, Cluster):
        return cluster(job)
    config = job
    plan = make_plan(config, command.costs())
    pipe, sizes = plan.pipeline, dataclasses.asdict(config.parallel)
    values = {**report.predicted(config, plan), "timeline": report.text_grid(plan.lanes)}
    units = ", ".join(str(encoder.units) for encoder in pipe.encoders)
    command.say(
        f"{config.parallel.devices} devices: {report.plan_words(sizes)}; virtual stages of"
        f" {', '.join(map(str, pipe.llm_layers))} LLM layers"
    )
    command.say(
        f"{pipe.microbatches} microbatches of {config.microbatch_rows} rows, cut into {units}"
        f" encoder units; {plan.program.used_ticks} ticks; {plan.program.slots}"
    )
    command.say("")
    command.say(report.text(values))
    command.say("")
    command.say(f"schedule, each device in its order:\n{plan.schedule}")
    if flags.FLAGS.out:
        method, folder = config.parallel.method, pathlib.Path(flags.FLAGS.out)
        executed = {"method": method, "methods": {method: written(of_plan(config, plan))}}
        write_plan({"method": method, "step_s": plan.step_s, KEY: executed}, folder)
        report.draw(folder, folder.name, config, plan, values)
        command.say(f"\nwritten: {folder} (plan.json, timeline.png, timeline.html, trace.json)")
    if flags.FLAGS.json:
        command.emit({**values, "schedule": str(plan.schedule)})
    return 0


def cluster(job: Cluster) -> int:
    """Answers for a cluster."""
    answer = answer_to(job)
    command.say(answer_report.text(answer))
    if flags.FLAGS.out:
        folder = pathlib.Path(flags.FLAGS.out)
        command.say(f"\n{execution_text(write(answer, folder))}")
        command.say(
            f"\nwritten: {folder} (plan.json, answer.json and the timeline: .png, .html,"
            " trace.json)"
        )
    if flags.FLAGS.json:
        command.emit(answer_report.values(answer))
    return 0


def write(answer: Answer, folder: pathlib.Path) -> dict[str, Any]:
    """Writes the plan of the recommended method, the answer, and pictures of all methods; returns
    the plan's part for the executor."""
    plan, executions = (
        answer_report.plan_values(answer, answer.recommended),
        execution_values(answer),
    )
    write_plan({**plan, KEY: executions}, folder)
    values = answer_report.values(answer)
    replace_text(folder / "answer.json", json.dumps(values, indent=2, allow_nan=False) + "\n")
    answer_page.write(answer, folder)
    return executions


def write_plan(plan: dict[str, Any], folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / "plan.json", json.dumps(plan, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    command.run(main, takes_clusters=True, runs_here=False)
