"""What a run on GPUs sets before jax starts: XLA's flags and the environment variables of NCCL,
CUDA and jax, one row for each, with its reason and its public source.

Left alone on purpose: what depends on the site (NCCL_SOCKET_IFNAME, NCCL_IB_HCA, NCCL_IB_SL and
their like), what NCCL's documentation keeps for debugging or discourages (NCCL_PROTO, NCCL_ALGO,
NCCL_LAUNCH_MODE), and what no public source gives a value for (NCCL_P2P_NET_CHUNKSIZE, the pieces
in which stages send to other machines). On a CPU there is nothing to set: nothing measured speaks
for a flag.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses

from optimus_jax.xla_reader import Word

_JAX_TOOLBOX = "NVIDIA/JAX-Toolbox docs/GPU_performance.md"
_DEBUG_OPTIONS = "xla/debug_options_flags.cc"
_NCCL = "NVIDIA/nccl docs/userguide/source/env.rst"
_A3 = "MaxText configs/a3/llama_2_7b/16vm.sh (H100)"
_COMBINED = (
    "A stage's weights are many arrays, gathered once before the first tick and scattered once"
    " after the last, with encoder work tied beside all of them: as one collective for each group"
    " of devices they all have it beside them. configs/compile_tp.py for 64 H100s: with 128 MiB 7"
    " gathers and 5 scatters, of which 1 and 0 held encoder products; so 2 and 2, which all do, and"
    " 2 sums of small weights."
)
_EVERYTHING = str(1 << 40)
_LINES = 1  # _IOLBF of stdio.h, on Linux
_PIPELINED = (
    "A loop over layers starts a collective one iteration early or ends it one late. It is for"
    " loops that gather weights; the tick programs compiled for H100s came out the same without."
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A row of the table: a flag of XLA, or an environment variable (its name is in capitals), for
    one platform, all its GPU generations or one, and the jaxlib versions from `since` on and before
    `before`. Of two rows of one name a generation's own holds. `aliases` are other names of the
    same variable."""

    name: str
    value: str
    reason: str
    source: str
    platform: str = "gpu"
    generation: str | None = None
    since: tuple[int, ...] = ()
    before: tuple[int, ...] = (9999,)
    aliases: tuple[str, ...] = ()

    @property
    def is_flag(self) -> bool:
        return self.name.islower()

    def __str__(self) -> str:
        return str(Word(self.name, self.value)) if self.is_flag else f"{self.name}={self.value}"


def _pipelined(kind: str) -> tuple[Setting, Setting]:
    """The flag's two spellings; the newer takes an enumeration."""
    source, turn = f"{_JAX_TOOLBOX}; xla/debug_options_flags.cc", (0, 11, 1)
    return (
        Setting(f"xla_gpu_enable_pipelined_{kind}", "true", _PIPELINED, source, before=turn),
        Setting(f"xla_gpu_pipeline_{kind}", "on", _PIPELINED, source, since=turn),
    )


def _in_the_switch(generation: str) -> Setting:
    return Setting(
        "NCCL_NVLS_ENABLE",
        "1",
        "NVLink's switches add up what shards reduce, and spread what they gather; it takes some"
        " memory on each GPU. NCCL's default (2) falls back in versions 2.27 and 2.28 where a"
        " process cannot have it, at which the others may hang; 1 ends the run in words. Not"
        " measured here.",
        f"{_JAX_TOOLBOX}; {_NCCL}",
        generation=generation,
    )


TABLE: tuple[Setting, ...] = (
    Setting(
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
    Setting("xla_gpu_all_gather_combine_threshold_bytes", _EVERYTHING, _COMBINED, _DEBUG_OPTIONS),
    Setting(
        "xla_gpu_reduce_scatter_combine_threshold_bytes", _EVERYTHING, _COMBINED, _DEBUG_OPTIONS
    ),
    Setting(
        "xla_gpu_all_reduce_combine_threshold_bytes",
        str(1 << 30),
        "Gradients are summed once, after the last tick, where little is left to overlap: few large"
        " all-reduces use the links best. Those inside a layer depend on one another and are never"
        " combined.",
        _A3,
    ),
    Setting(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        "16",
        "A loop over tasks that holds collectives counts as one itself: at the default of 1 what"
        " stands beside it is synchronous. At 2, of two gatherings of weights one has the loop over"
        " encoder tasks beside it, at 16 both (configs/compile_tp.py for 64 H100s). All still use"
        " one stream and run in order. Compiled, not run.",
        "xla/service/gpu/gpu_hlo_schedule.cc",
    ),
    Setting(
        "xla_gpu_experimental_use_collective_kernels",
        "",
        "No kernels of XLA's own for small all-reduces: compiling them for configs/compile_tp.py"
        " jaxlib 0.12.0.1 aborts (size mismatch when packing elements for LLVM struct).",
        _DEBUG_OPTIONS,
        since=(0, 12),
    ),
    Setting(
        "xla_gpu_enable_command_buffer",
        "",
        "No CUDA graphs: NVIDIA's recipes for H100 turn them off. Not measured here.",
        "NVIDIA/JAX-Toolbox rosetta/projects/maxtext/xla_flags/llama2-7b-1N8G.env",
        generation="h100",
    ),
    Setting(
        "xla_gpu_enable_command_buffer",
        "FUSION,CUSTOM_CALL",
        "CUDA graphs of these two only: hides the launches, which weigh more on a faster GPU. Not"
        " measured here.",
        f"{_JAX_TOOLBOX}, tips for Blackwell",
        generation="b200",
    ),
    _in_the_switch("h100"),
    _in_the_switch("b200"),
    Setting(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "1",
        "One queue of work for each GPU: kernels start in the order of the program, so that a"
        " collective is not kept waiting behind the compute that is to hide it. NVIDIA's script"
        " sets it for Hopper only, and it slows Blackwell down. Not measured here.",
        f"{_JAX_TOOLBOX}; NVIDIA/JAX-Toolbox .github/container/test-maxtext.sh",
        generation="h100",
    ),
    Setting(
        "XLA_CLIENT_MEM_FRACTION",
        "0.9",
        "The share of a GPU's memory that jax takes, 0.75 without it. The rest is for NCCL's"
        " buffers and CUDA's libraries.",
        f"{_JAX_TOOLBOX}; jax-ml/jax docs/201/gpu-memory.md",
        aliases=("XLA_PYTHON_CLIENT_MEM_FRACTION",),  # its old name; both at once are an error
    ),
    Setting(
        "NCCL_DEBUG",
        "WARN",
        "A call that fails says why, where XLA only says that one did.",
        _NCCL,
    ),
)


def print_by_line() -> None:
    """Lets what C libraries print to stdout appear line by line.

    There NCCL says what is wrong. Into a pipe or a file the C library would keep it until the
    process ends, so after the JSON line of --json, and lose it where the watchdog ends the process.
    NCCL_DEBUG_FILE=/dev/stderr is no way out: NCCL opens that file anew with "w", which empties a
    log that stderr goes to (NVIDIA/nccl src/debug.cc). To be called before jax starts.
    """
    with contextlib.suppress(OSError, AttributeError, ValueError):
        libc = ctypes.CDLL(None)
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _LINES, ctypes.c_size_t(0))
