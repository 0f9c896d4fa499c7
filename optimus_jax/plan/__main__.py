"""python -m optimus_jax.plan: what a configuration will do, before anything compiles."""

from __future__ import annotations

from absl import flags

from optimus_jax import command, report
from optimus_jax.plan.plan import make_plan

command.define_config()
command.define_costs()


def main() -> int:
    config = command.config()
    plan = make_plan(config, command.costs())
    p, pipe = config.parallel, config.pipeline
    values = {**report.predicted(config, plan), "timeline": report.text_grid(plan.lanes)}
    command.say(
        f"{p.dp * p.pp} devices: dp {p.dp} x pp {p.pp}, virtual stages of"
        f" {', '.join(map(str, pipe.llm_layers))} LLM layers; a whole encoder on each device"
    )
    command.say(
        f"{p.microbatches} microbatches of {config.microbatch_rows} rows, cut into {pipe.units}"
        f" encoder units; {plan.program.used_ticks} ticks; {plan.program.slots}"
    )
    command.say("")
    command.say(report.text(values))
    command.say("")
    command.say(f"schedule, each device in its order:\n{plan.schedule}")
    if flags.FLAGS.json:
        command.emit({**values, "schedule": str(plan.schedule)})
    return 0


if __name__ == "__main__":
    command.run(main)
