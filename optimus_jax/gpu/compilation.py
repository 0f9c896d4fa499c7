"""Compiling a step for devices that are not there, and what the compiler says of it."""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
import time
from typing import Any

import jax

from optimus_jax.gpu import predicted
from optimus_jax.gpu.predicted import Timed
from optimus_jax.gpu.windows import Collective, collectives
from optimus_jax.runtime.memory import measured_bytes

# jax 0.12 replaces small all-reduces by kernels of its own, which the first option leaves alone;
# jax 0.10 has none, and does not know the option.
SYNCHRONOUS = {"xla_gpu_disable_async_collectives": "ALLCOLLECTIVES"}
PLAIN = {"xla_gpu_experimental_use_collective_kernels": ""}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled step: its scheduled HLO and what was read from it, seconds of the compilation,
    bytes on one device by use, and XLA's times."""

    hlo: str
    seconds: float
    memory: dict[str, int]
    collectives: list[Collective]
    timed: list[Timed]


def compile_step(lowered: Any, options: dict[str, Any] | None = None) -> Compiled:
    """Compiles a lowered step (jax.stages.Lowered)."""
    with tempfile.TemporaryDirectory(prefix="optimus_jax_") as name:
        dump = {"xla_dump_to": name, "xla_dump_latency_hiding_schedule": True}
        began = time.monotonic()
        compiled = lowered.compile(compiler_options={**(options or {}), **dump})
        seconds = time.monotonic() - began
        timed = predicted.read(pathlib.Path(name))
    hlo = compiled.as_text()
    return Compiled(hlo, seconds, measured_bytes(compiled), collectives(hlo), timed)


def compile_synchronous(lowered: Any) -> Compiled:
    """The same with every collective synchronous: nothing can lie beside one."""
    try:
        return compile_step(lowered, {**SYNCHRONOUS, **PLAIN})
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return compile_step(lowered, SYNCHRONOUS)
