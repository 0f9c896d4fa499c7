"""python -m optimus_jax.bench: what each method costs, measured, beside what was predicted.

Times every kind of task alone, plans each method from these costs, then runs the methods by turns:
whole training steps, one process for each pipeline stage, each on a core of its own. With --emulate
tasks are sleeps (config.emulate), so that many stages run on few cores.
"""

from __future__ import annotations

import os
import sys

from absl import flags

from optimus_jax import cluster, command, processes
from optimus_jax.config_checks import did_you_mean
from optimus_jax.errors import UserError
from optimus_jax.schedule.methods import METHODS

command.define_config("configs/bench.py")
flags.DEFINE_integer("processes", 0, "Processes: one for each device (default: as many as needed).")
flags.DEFINE_list("methods", list(METHODS), "Methods to compare, with commas between.")
flags.DEFINE_integer("rounds", 15, "Rounds, in each of which every method runs once.", 1)
flags.DEFINE_bool("emulate", False, "Tasks sleep; exchanges and the step's end are real.")
flags.DEFINE_bool("timeline", True, "Run one more step of each method to note when its tasks run.")


def main() -> int:
    options, config = flags.FLAGS, command.config()
    methods = list(dict.fromkeys(options.methods))
    devices = config.parallel.dp * config.parallel.pp
    check(methods, options.processes or devices, devices)
    if devices > 1 and cluster.count() == 1:
        line = [sys.executable, "-m", "optimus_jax.bench", *sys.argv[1:]]
        return processes.run_local(line, devices)
    if not options.emulate and devices > len(os.sched_getaffinity(0)) and cluster.count() == 1:
        command.say(CROWDED.format(devices=devices))
    cluster.configure_cpu_devices(1)
    cluster.initialize()
    from optimus_jax import bench_report
    from optimus_jax.measure import contest

    done = contest.run(config, methods, options.rounds, options.emulate, options.timeline)
    if command.is_first():
        values = bench_report.values(done)
        bench_report.write(command.workdir(), done, values)
        command.say(bench_report.text(values))
        if options.json:
            command.emit(bench_report.summary(values))
    return 0


CROWDED = (
    "{devices} devices share fewer cores: measured times say little about the schedule; --emulate"
    " needs no cores"
)


def check(methods: list[str], count: int, devices: int) -> None:
    """Raises UserError with everything that is wrong with the command line."""
    wrong = [
        f"--methods: unknown {name!r}{did_you_mean(name, list(METHODS))}"
        for name in methods
        if name not in METHODS
    ]
    if not methods:
        wrong.append(f"--methods: none named (valid: {', '.join(METHODS)})")
    if count != devices:
        wrong.append(
            f"--processes={count}: the plan has {devices} devices, and each is to have a process"
            f" of its own; pass --processes={devices} or another --config"
        )
    if wrong:
        raise UserError("\n".join(wrong))


if __name__ == "__main__":
    command.run(main)
