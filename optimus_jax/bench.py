"""python -m optimus_jax.bench: what each method costs, measured, beside what was predicted.

Times every kind of task alone, plans each method from these costs, then runs the methods by turns:
whole training steps, one process for each device, each on a core of its own. With --emulate
tasks are sleeps (config.emulate), so that many stages run on few cores.
"""

from __future__ import annotations

import sys
import time

from absl import flags

from optimus_jax import command
from optimus_jax.config import Config
from optimus_jax.config_checks import did_you_mean
from optimus_jax.cost.analytic import analytic
from optimus_jax.errors import UserError
from optimus_jax.measure import start
from optimus_jax.plan.plan import BALANCED, pipeline_for
from optimus_jax.schedule.methods import FSDP, METHODS, schedule
from optimus_jax.schedule.task import ScheduleError

command.define_config("configs/bench.py")
start.define_processes()
flags.DEFINE_list(
    "methods",
    None,
    f"Methods to compare, with commas between; {FSDP} is one too (default: all others that run the"
    " configuration).",
)
flags.DEFINE_integer("rounds", 40, "Rounds, in each of which every method runs once.", 1)
flags.DEFINE_bool("emulate", False, "Tasks sleep; exchanges and the step's end are real.")
flags.DEFINE_bool("timeline", True, "Run a few more steps of each to note when its tasks run.")


def main() -> int:
    options, config = flags.FLAGS, command.config()
    named = runnable(config) if options.methods is None else options.methods
    methods = list(dict.fromkeys(named))
    wrong = start.wrong_processes(config) + wrong_methods(methods, config, options.emulate)
    if wrong:
        raise UserError("\n".join(wrong))
    code = start.start("optimus_jax.bench", config, crowded=options.emulate)
    if code is not None:
        return code
    from optimus_jax import bench_report
    from optimus_jax.measure import contest

    began = time.monotonic()

    def say(text: str) -> None:
        if command.is_first():
            print(f"[{time.monotonic() - began:6.1f} s] {text}", file=sys.stderr, flush=True)

    done = contest.run(config, methods, options.rounds, options.emulate, options.timeline, say)
    if command.is_first():
        values = bench_report.values(done)
        where = bench_report.write(command.workdir(), done, values)
        command.say(bench_report.text(values))
        command.say(f"\nreport: {where} (timeline.html, trace.json, report.json, profile.json)")
        if options.json:
            command.emit(bench_report.summary(values))
    return 0


def runnable(config: Config) -> list[str]:
    """The methods with a schedule that run a configuration."""
    return [name for name in METHODS if not _why_not(config, name)]


def _why_not(config: Config, method: str) -> str | None:
    """Why a method makes no schedule of this configuration, in words; None if it does. A checked
    configuration has one of every method but `balanced`, or where encoder state has a cap."""
    if method != BALANCED and not config.parallel.encoder_cap:
        return None
    costs = analytic(config)
    try:
        pipe = pipeline_for(config, costs, method)
        schedule(method, config.parallel.order, pipe, costs.durations(config, pipe))
    except ScheduleError as error:
        return str(error)
    return None


def wrong_methods(methods: list[str], config: Config, emulate: bool = False) -> list[str]:
    """What is wrong with --methods, in words."""
    valid = [*METHODS, FSDP]
    wrong = [
        f"--methods: unknown {name!r}{did_you_mean(name, valid)}"
        for name in methods
        if name not in valid
    ]
    for name in methods:
        if name in METHODS and (why := _why_not(config, name)):
            wrong.append(f"--methods: {why}; leave {name} out or change the plan")
    if FSDP in methods and emulate:
        wrong.append(f"--methods: {FSDP} has no tasks that could sleep; leave it out or --emulate")
    if FSDP in methods and config.train.batch % config.parallel.devices:
        wrong.append(
            f"--methods: {FSDP} cuts the batch over all devices, and {config.train.batch} rows do"
            f" not divide among {config.parallel.devices}; leave it out or change the batch"
        )
    if methods == [FSDP]:
        wrong.append(f"--methods: {FSDP} alone; name another to compare it with")
    return wrong if methods else [f"--methods: none named (valid: {', '.join(valid)})"]


if __name__ == "__main__":
    command.run(main)
