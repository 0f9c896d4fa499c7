"""python -m optimus_jax.xla_flags: the XLA flags of a platform, why, and whether they are known.

    python -m optimus_jax.xla_flags --platform=gpu --generation=h100
    XLA_FLAGS="$(python -m optimus_jax.xla_flags --export)"

XLA ends the process at a flag that it does not know and at a value that it cannot read. So every
command calls `apply` before jax is imported: it says in words what is wrong with the user's
XLA_FLAGS, and adds the flags of TABLE that the user has not set. Asynchronous collectives, their
high-priority stream and the speed-of-light latency estimator are XLA's defaults and not repeated
here; scheduling groups are annotations of the program, no version has a flag for them. On a CPU
the table is empty: nothing measured speaks for a flag.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import functools
import importlib.util
import mmap
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata

from optimus_jax import cluster
from optimus_jax.errors import UserError

VARIABLE = "XLA_FLAGS"
PLATFORMS = ("cpu", "gpu", "tpu")
GENERATIONS = {"a100": r"A100", "h100": r"G?H[12]00", "b200": r"G?B[123]00"}  # in a GPU's name

_JAX_TOOLBOX = "NVIDIA/JAX-Toolbox docs/GPU_performance.md"
_A3 = "MaxText configs/a3/llama_2_7b/16vm.sh (H100)"
_GATHERS = (
    "A stage's weights are many small arrays. Compiled for 8 H100s, 17 of them, with the default of"
    " 30 MiB: 10 gathers, 3 scatters; with this: 5 and 1, and 156 MiB less scratch memory. A large"
    " weight still travels alone, so that its first use waits for no other."
)
_PIPELINED = (
    "A loop over layers starts a collective in the iteration before its use, or ends it in the one"
    " after, instead of waiting within one iteration."
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
    Flag("xla_gpu_all_gather_combine_threshold_bytes", str(128 << 20), _GATHERS, _A3),
    Flag("xla_gpu_reduce_scatter_combine_threshold_bytes", str(128 << 20), _GATHERS, _A3),
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
        "2",
        "A switch over tasks that holds an all-reduce counts as a collective itself: at the default"
        " of 1 an exchange beside it is synchronous, at 2 the whole task lies inside. Both still"
        " use one stream and run in order. Compiled for H100s, not run on any.",
        "xla/service/gpu/gpu_hlo_schedule.cc",
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


@dataclasses.dataclass(frozen=True)
class Word:
    """One flag of XLA_FLAGS; `value` is None where it has no `=`."""

    name: str
    value: str | None

    def __str__(self) -> str:
        if self.value is None:
            return f"--{self.name}"
        if re.search(r"\s", self.value) or self.value[:1] in ("'", '"'):
            quoted = re.sub(r'(["\\])', r"\\\1", self.value)
            return f'--{self.name}="{quoted}"'
        return f"--{self.name}={self.value}"


_QUOTED = r'"((?:\\.|[^"\\])*)"|\'([^\']*)\''
_WORD = re.compile(rf"--([-\w]*)(?:=(?:{_QUOTED})|(?:=(\S*))|(?=\s|$))", re.ASCII | re.DOTALL)


def parse(text: str) -> list[Word]:
    """What XLA reads in `text`, a value of XLA_FLAGS: flags, or the name of a file of flags.

    Raises UserError for a file that cannot be read and a word that is no flag, where XLA would
    silently stop reading. Source: xla/parse_flags_from_env.cc.
    """
    where = VARIABLE
    if text and not text.lstrip().startswith("-"):
        try:
            where, text = f"{VARIABLE}={text}", pathlib.Path(text).read_text()
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a text"
            raise UserError(
                f"{VARIABLE}={text}: {reason}; a value without leading -- names a file of flags"
            ) from None
    words, rest = [], text.strip()
    while rest:
        match = _WORD.match(rest)
        if not match:
            raise UserError(f"{where}: {rest.split()[0]!r} is not a flag (--name or --name=value)")
        name, double, single, plain = match.groups()
        double = double and re.sub(r"\\(.)", r"\1", double, flags=re.DOTALL)
        value = next((v for v in (double, single, plain) if v is not None), None)
        words.append(Word(name, value))
        rest = rest[match.end() :].lstrip()
    return words


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
    if not _reads((*users, *ours)):
        wrong = [w for w in users if not _reads((w,))]
        if wrong:
            raise UserError("\n  ".join(_complaint(w) for w in wrong))
        ours = [w for w in ours if _reads((w,))]
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


def jaxlib_version() -> tuple[int, ...]:
    """Of the installed jaxlib, without importing it."""
    return tuple(int(part) for part in re.findall(r"\d+", metadata.version("jaxlib")))


@functools.cache
def _libraries() -> tuple[mmap.mmap, ...]:
    """The libraries that read XLA_FLAGS: jaxlib's, and that of a CUDA plugin."""
    files = []
    for package, pattern in (("jaxlib", "*"), ("jax_plugins", "xla_cuda*/*")):
        spec = importlib.util.find_spec(package)
        for folder in spec.submodule_search_locations or () if spec else ():
            found = [p for p in pathlib.Path(folder).glob(pattern) if p.suffix in (".so", ".dylib")]
            files += sorted(found, key=lambda p: p.stat().st_size)[-1:]
    maps = []
    for path in files:
        with path.open("rb") as file:
            maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    return tuple(maps)


def known(name: str) -> bool:
    """Whether the installed libraries hold `name` as a string of its own, as they do their flags'.

    A known one is found within 20 ms, an unknown one costs a look at all 350 MB (0.4 s).
    """
    return all(library.find(b"\0%b\0" % name.encode()) >= 0 for library in _libraries())


def names() -> list[str]:
    """The flags that jaxlib knows, and a few strings that look like them."""
    found = re.findall(rb"\0(xla_[a-z0-9_]+)(?=\0)", _libraries()[0]) if _libraries() else []
    return sorted({name.decode() for name in found})


_START = "from jaxlib import xla_client; xla_client.make_cpu_client()"
_ENDED = ("Unknown flag", "Flag parsing failed")


@functools.cache
def _reads(words: tuple[Word, ...]) -> bool:
    """Whether jaxlib starts with these flags, tried in a process of its own (0.2 s). What the
    process says decides; any other failure is for the command itself to meet."""
    environment = {**os.environ, VARIABLE: " ".join(map(str, words)), "JAX_PLATFORMS": "cpu"}
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        tried = subprocess.run(
            [sys.executable, "-c", _START],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
        )
        return tried.returncode == 0 or not any(said in tried.stderr for said in _ENDED)
    return True


def _complaint(word: Word) -> str:
    version = metadata.version("jaxlib")
    if known(word.name):
        return f"{VARIABLE}: jaxlib {version} cannot read the value in {word}"
    near = difflib.get_close_matches(word.name, names(), n=3, cutoff=0.7)
    hint = f"; did you mean --{' or --'.join(near)}?" if near else ""
    return f"{VARIABLE}: jaxlib {version} does not know --{word.name}{hint}"


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
