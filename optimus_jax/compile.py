"""python -m optimus_jax.compile: the training step, compiled for GPUs that are not there.

Says of each collective of the LLM which kernels were scheduled between its start and its done and
how many of them are the encoder's, then memory, XLA's own predicted times, what was not overlapped,
and what compiling cost: seconds by part, size of the program, memory of this process. The XLA flags
are those of a run on such GPUs (optimus_jax.xla_flags). --pairing=off and --control compile again,
to compare. Needs no GPU; the compiler goes into .venv-gpu, which the first call builds (about a
minute, 1.1 to 1.4 GB).
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

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
    from optimus_jax.gpu.size import program_size
    from optimus_jax.plan.plan import make_plan
    from optimus_jax.runtime.abstract_step import traced_step
    from optimus_jax.runtime.memory import memory_table

    took: dict[str, float] = {}
    with _timed(took, "plan"):
        program = make_plan(config).program
    with _timed(took, "devices"):
        devices = gpus.devices()
    with _timed(took, "trace"):
        executor, traced = traced_step(config, program, devices)
    table = memory_table(executor, traced)
    with _timed(took, "lower"):
        lowered = traced.lower()
    found = {report.PLANNED: compile_step(lowered)}
    took["compile"] = found[report.PLANNED].seconds
    size, peak = program_size(found[report.PLANNED].hlo), peak_bytes()
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
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in took.items())
    command.say(f"\nseconds of one compile: {parts}\n{size}")
    command.say(f"most memory of this process up to then: {peak / 2**30:.2f} GiB")
    if options.json:
        cost = {
            "seconds": {name: round(seconds, 3) for name, seconds in took.items()},
            "hlo": dataclasses.asdict(size),
            "peak_process_bytes": peak,
            "predicted_memory_bytes": table.total,
        }
        command.emit({**report.values(gpus, found, passes), **cost})
    return 0


@contextmanager
def _timed(took: dict[str, float], name: str) -> Iterator[None]:
    """Adds the seconds of a part under its name."""
    began = time.monotonic()
    yield
    took[name] = time.monotonic() - began


def peak_bytes() -> int:
    """The most memory that this process has had. Linux counts it in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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
