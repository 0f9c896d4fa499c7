"""python -m optimus_jax.xla_flags: the XLA flags of a platform, why, and whether they are known.

    python -m optimus_jax.xla_flags --platform=gpu --generation=h100
    XLA_FLAGS="$(python -m optimus_jax.xla_flags --export)"

XLA ends the process at a flag that it does not know and at a value that it cannot read. So every
command that runs a step calls `apply` before jax is imported: it says in words what is wrong with
the user's XLA_FLAGS, and adds the flags of TABLE that the user has not set. Asynchronous
collectives, their high-priority stream and the speed-of-light latency estimator are XLA's defaults
and not repeated here; scheduling groups are annotations of the program, no version has a flag for
them. On a CPU the table is empty: nothing measured speaks for a flag.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import re
import sys
from collections.abc import Iterable
from importlib import metadata

from optimus_jax import cluster
from optimus_jax.errors import UserError
from optimus_jax.xla_reader import (
    VARIABLE,
    Word,
    complaint,
    jaxlib_version,
    known,
    parse,
    refusal,
)

PLATFORMS = ("cpu", "gpu", "tpu")
GENERATIONS = {"a100": r"A100", "h100": r"G?H[12]00", "b200": r"G?B[123]00"}  # in a GPU's name

_JAX_TOOLBOX = "NVIDIA/JAX-Toolbox docs/GPU_performance.md"
_DEBUG_OPTIONS = "xla/debug_options_flags.cc"
_A3 = "MaxText configs/a3/llama_2_7b/16vm.sh (H100)"
_COMBINED = (
    "A stage's weights are many arrays, gathered once before the first tick and scattered once"
    " after the last, with encoder work tied beside all of them: as one collective for each group"
    " of devices they all have it beside them. configs/compile_tp.py for 64 H100s: with 128 MiB 7"
    " gathers and 5 scatters, of which 1 and 0 held encoder products; so 2 and 2, which all do, and"
    " 2 sums of small weights."
)
_EVERYTHING = str(1 << 40)
_PIPELINED = (
    "A loop over layers starts a collective one iteration early or ends it one late. It is for"
    " loops that gather weights; the tick programs compiled for H100s came out the same without."
)


@dataclasses.dataclass(frozen=True)
class Flag:
    """A row of the table: for one platform, all its GPU generations or one, and the jaxlib versions
    from `since` on and before `before`. Of two rows of one name a generation's own holds."""

    name: str
    value: str
    reason: str
    source: str
    platform: str = "gpu"
    generation: str | None = None
    since: tuple[int, ...] = ()
    before: tuple[int, ...] = (9999,)

    def __str__(self) -> str:
        return str(Word(self.name, self.value))


def _pipelined(kind: str) -> tuple[Flag, Flag]:
    """The flag's two spellings; the newer takes an enumeration."""
    source, turn = f"{_JAX_TOOLBOX}; xla/debug_options_flags.cc", (0, 11, 1)
    return (
        Flag(f"xla_gpu_enable_pipelined_{kind}", "true", _PIPELINED, source, before=turn),
        Flag(f"xla_gpu_pipeline_{kind}", "on", _PIPELINED, source, since=turn),
    )


TABLE = (
    Flag(
        "xla_gpu_enable_latency_hiding_scheduler",
        "true",
        "Orders a program so that compute lies between a collective's start and its end. From"
        " Hopper on XLA does so by itself. Compiled for A100s, 3 of the 4 all-reduces of a scan"
        " over layers are synchronous without it and none with it.",
        f"{_JAX_TOOLBOX}; xla/service/gpu/gpu_hlo_schedule.cc",
    ),
    *_pipelined("all_reduce"),
    *_pipelined("all_gather"),
    *_pipelined("reduce_scatter"),
    Flag("xla_gpu_all_gather_combine_threshold_bytes", _EVERYTHING, _COMBINED, _DEBUG_OPTIONS),
    Flag("xla_gpu_reduce_scatter_combine_threshold_bytes", _EVERYTHING, _COMBINED, _DEBUG_OPTIONS),
    Flag(
        "xla_gpu_all_reduce_combine_threshold_bytes",
        str(1 << 30),
        "Gradients are summed once, after the last tick, where little is left to overlap: few large"
        " all-reduces use the links best. Those inside a layer depend on one another and are never"
        " combined.",
        _A3,
    ),
    Flag(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        "16",
        "A loop over tasks that holds collectives counts as one itself: at the default of 1 what"
        " stands beside it is synchronous. At 2, of two gatherings of weights one has the loop over"
        " encoder tasks beside it, at 16 both (configs/compile_tp.py for 64 H100s). All still use"
        " one stream and run in order. Compiled, not run.",
        "xla/service/gpu/gpu_hlo_schedule.cc",
    ),
    Flag(
        "xla_gpu_experimental_use_collective_kernels",
        "",
        "No kernels of XLA's own for small all-reduces: compiling them for configs/compile_tp.py"
        " jaxlib 0.12.0.1 aborts (size mismatch when packing elements for LLVM struct).",
        _DEBUG_OPTIONS,
        since=(0, 12),
    ),
    Flag(
        "xla_gpu_enable_command_buffer",
        "",
        "No CUDA graphs: NVIDIA's recipes for H100 turn them off. Not measured here.",
        "NVIDIA/JAX-Toolbox rosetta/projects/maxtext/xla_flags/llama2-7b-1N8G.env",
        generation="h100",
    ),
    Flag(
        "xla_gpu_enable_command_buffer",
        "FUSION,CUSTOM_CALL",
        "CUDA graphs of these two only: hides the launches, which weigh more on a faster GPU. Not"
        " measured here.",
        f"{_JAX_TOOLBOX}, tips for Blackwell",
        generation="b200",
    ),
)


def flags(
    platform: str, generation: str | None = None, version: tuple[int, ...] | None = None
) -> list[Flag]:
    """The rows of the table for a platform, a GPU generation and a jaxlib (default: the installed
    one)."""
    version = version or jaxlib_version()
    found: dict[str, Flag] = {}
    for flag in TABLE:
        if flag.platform != platform or flag.generation not in (None, generation):
            continue
        if flag.since <= version < flag.before and (flag.generation or flag.name not in found):
            found[flag.name] = flag
    return list(found.values())


def merged(platform: str, generation: str | None = None, text: str | None = None) -> str:
    """The user's flags (default: XLA_FLAGS), checked, then those of the table that the user has
    not set and that the installed jaxlib knows. Raises UserError naming every wrong flag."""
    text = os.environ.get(VARIABLE, "") if text is None else text
    users = parse(text)
    ours = [Word(f.name, f.value) for f in flags(platform, generation)]
    ours = [w for w in ours if w.name not in {u.name for u in users} and known(w.name)]
    if not users and not ours:
        return ""
    if refusal((*users, *ours)):
        wrong = [w for w in users if refusal((w,))]
        if wrong:
            raise UserError("\n  ".join(map(complaint, wrong)))
        ours = [w for w in ours if not refusal((w,))]
    return " ".join(map(str, [*users, *ours])) if ours else text


def apply() -> None:
    """Sets XLA_FLAGS to the user's and the table's flags for this machine; to be called before jax
    is imported. Does nothing without jaxlib. Raises UserError as `merged` does."""
    if importlib.util.find_spec("jaxlib"):
        value = merged(cluster.platform(), generation(cluster.gpus()))
        if value != os.environ.get(VARIABLE, ""):
            os.environ[VARIABLE] = value


def describe(platform: str, generation: str | None = None) -> str:
    """A line for each flag of the table: value, whether the user's own holds or jaxlib does not
    know it, reason and source."""
    users = {w.name: w for w in parse(os.environ.get(VARIABLE, ""))}
    lines = []
    for flag in flags(platform, generation):
        note = ""
        if flag.name in users and str(users[flag.name]) != str(flag):
            note = f" (left out: you set {users[flag.name]})"
        elif not known(flag.name):
            note = f" (left out: unknown to jaxlib {metadata.version('jaxlib')})"
        lines.append(f"{flag}{note}: {flag.reason} [{flag.source}]")
    return "\n".join(lines) or f"no flags for {platform}"


def generation(gpus: str) -> str | None:
    """The generation in what nvidia-smi says of the GPUs, None if none that the table knows."""
    found = (g for g, name in GENERATIONS.items() if re.search(rf"\b{name}\b", gpus))
    return next(found, None)


def main(arguments: Iterable[str] | None = None) -> int:
    own = cluster.platform(), generation(cluster.gpus())
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--platform", choices=PLATFORMS, default=own[0])
    parser.add_argument("--generation", choices=GENERATIONS, default=own[1])
    parser.add_argument("--export", action="store_true", help="print the value for XLA_FLAGS")
    asked = parser.parse_args(None if arguments is None else list(arguments))
    try:
        value = merged(asked.platform, asked.generation)
        print(value if asked.export else describe(asked.platform, asked.generation))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
