"""python -m optimus_jax.bench: what each method costs, measured, beside what was predicted.

Times every kind of task alone, plans each method from these costs, then runs the methods by turns:
whole training steps, one process for each pipeline stage, each on a core of its own. With --emulate
tasks are sleeps (config.emulate), so that many stages run on few cores.
"""

from __future__ import annotations

import sys
import time

from absl import flags

from optimus_jax import command
from optimus_jax.config_checks import did_you_mean
from optimus_jax.errors import UserError
from optimus_jax.measure import start
from optimus_jax.schedule.methods import FSDP, METHODS

command.define_config("configs/bench.py")
start.define_processes()
flags.DEFINE_list(
    "methods", list(METHODS), f"Methods to compare, with commas between; {FSDP} is one too."
)
flags.DEFINE_integer("rounds", 40, "Rounds, in each of which every method runs once.", 1)
flags.DEFINE_bool("emulate", False, "Tasks sleep; exchanges and the step's end are real.")
flags.DEFINE_bool("timeline", True, "Run a few more steps of each to note when its tasks run.")


def main() -> int:
    options, config = flags.FLAGS, command.config()
    methods = list(dict.fromkeys(options.methods))
    wrong = start.wrong_processes(config) + wrong_methods(methods)
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


def wrong_methods(methods: list[str]) -> list[str]:
    """What is wrong with --methods, in words."""
    valid = [*METHODS, FSDP]
    wrong = [
        f"--methods: unknown {name!r}{did_you_mean(name, valid)}"
        for name in methods
        if name not in valid
    ]
    if FSDP in methods and flags.FLAGS.emulate:
        wrong.append(f"--methods: {FSDP} has no tasks that could sleep; leave it out or --emulate")
    if methods == [FSDP]:
        wrong.append(f"--methods: {FSDP} alone; name another to compare it with")
    return wrong if methods else [f"--methods: none named (valid: {', '.join(valid)})"]


if __name__ == "__main__":
    command.run(main)
