"""python -m optimus_jax.compile: the training step, compiled for GPUs that are not there.

Says of each collective of the LLM which kernels were scheduled between its start and its done and
how many of them are the encoder's, then memory, XLA's own predicted times, and what was not
overlapped. The XLA flags are those of a run on such GPUs (optimus_jax.xla_flags). --pairing=off and
--control compile again, to compare. Needs no GPU; the compiler goes into .venv-gpu, which the first
call builds (about a minute, 1.1 to 1.4 GB).
"""

from __future__ import annotations

import os
import pathlib
import sys

from absl import flags

from optimus_jax import command, xla_flags
from optimus_jax.config import Config
from optimus_jax.errors import UserError
from optimus_jax.gpu import environment
from optimus_jax.gpu.target import Target, target

command.define_config("configs/compile_tp.py")
flags.DEFINE_string("target", "h100x64", "Kind and number of GPUs.")
flags.DEFINE_string("hlo", "", "Write the scheduled HLO to this file.")
flags.DEFINE_enum(
    "pairing", "on", ["on", "off"], "off: compile once more with pairing off, printed beside."
)
flags.DEFINE_bool("control", False, "Compile once more with all collectives synchronous.")
flags.DEFINE_string(
    "jax", "", f"jax to compile with: a version or {environment.NEWEST} (default: the one here)."
)


def main() -> int:
    options, config = flags.FLAGS, command.config()
    gpus = target(options.target)
    check_devices(config, gpus)
    check_folder(options.hlo)
    if not environment.is_one():
        chosen = environment.environment(options.jax)
        environment.build(chosen, lambda text: print(text, file=sys.stderr, flush=True))
        environment.execute(chosen, "optimus_jax.compile", sys.argv[1:])
    os.environ[xla_flags.VARIABLE] = xla_flags.merged("gpu", xla_flags.generation(gpus.gpu.name))
    from optimus_jax.gpu import report, runs
    from optimus_jax.gpu.compilation import compile_step, compile_synchronous
    from optimus_jax.plan.plan import make_plan
    from optimus_jax.runtime.abstract_step import traced_step
    from optimus_jax.runtime.memory import memory_table

    program, devices = make_plan(config).program, gpus.devices()
    executor, traced = traced_step(config, program, devices)
    table, lowered = memory_table(executor, traced), traced.lower()
    found = {report.PLANNED: compile_step(lowered)}
    if options.hlo:
        pathlib.Path(options.hlo).write_text(found[report.PLANNED].hlo)
    if options.pairing == "off":
        loose = traced_step(config, program, devices, tied=False)[1].lower()
        found[report.UNPAIRED] = compile_step(loose)
    if options.control:
        found[report.CONTROL] = compile_synchronous(lowered)
    passes = runs.passes(program)
    command.say(report.text(gpus, found, passes))
    command.say(f"\nmemory that the plan predicted, beside which XLA's own stands above\n{table}")
    if options.json:
        predicted = {"predicted_memory_bytes": table.total}
        command.emit({**report.values(gpus, found, passes), **predicted})
    return 0


def check_devices(config: Config, gpus: Target) -> None:
    """Raises UserError if the plan is for another number of devices."""
    p = config.parallel
    if p.devices != gpus.count:
        raise UserError(
            f"--target={gpus} has {gpus.count} GPUs, the plan {p.devices} devices (dp {p.dp} x pp"
            f" {p.pp} x tp {p.tp}): pass --target={gpus.kind}x{p.devices} or change the plan"
        )


def check_folder(name: str) -> None:
    """Raises UserError if the file cannot be written."""
    path = pathlib.Path(name)
    if name and not path.parent.is_dir():
        raise UserError(f"--hlo={name}: there is no folder {path.parent}")
    if name and path.is_dir():
        raise UserError(f"--hlo={name}: is a folder; name a file in it")


if __name__ == "__main__":
    command.run(main, runs_here=False)
