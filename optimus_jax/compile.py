"""python -m optimus_jax.compile: the training step, compiled for GPUs that are not there.

Says of each collective of the LLM which kernels were scheduled between its start and its done and
how many of them are the encoder's, then memory, XLA's own predicted times, and what was not
overlapped. The XLA flags are those of a run on such GPUs (optimus_jax.xla_flags). --pairing=off and
--control compile again, to compare. Needs no GPU; the compiler goes into .venv-gpu, which the first
call builds (about a minute, 1.2 GB).
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

    program, devices = make_plan(config).program, gpus.devices()
    lowered = traced_step(config, program, devices)[1].lower()
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
    if options.json:
        command.emit(report.values(gpus, found, passes))
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
    """Raises UserError if the file has no folder to be written to."""
    folder = pathlib.Path(name).parent
    if name and not folder.is_dir():
        raise UserError(f"--hlo={name}: there is no folder {folder}")


if __name__ == "__main__":
    command.run(main)
