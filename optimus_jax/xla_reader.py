"""How jaxlib reads XLA_FLAGS, found out without jax: XLA ends the process at what it cannot read.

Source: xla/parse_flags_from_env.cc and xla/tsl/util/command_line_flags.cc of openxla/xla.
"""

from __future__ import annotations

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
from importlib import metadata

from optimus_jax.errors import UserError

VARIABLE = "XLA_FLAGS"


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
    found = (
        re.findall(rb"\0(xla_[a-z0-9]+_[a-z0-9_]+)(?=\0)", _libraries()[0]) if _libraries() else []
    )
    return sorted({name.decode() for name in found})


_START = "from jaxlib import xla_client; xla_client.make_cpu_client()"
_REFUSALS = {"Unknown flag": "does not know", "Flag parsing failed": "cannot read the value of"}


@functools.cache
def refusal(words: tuple[Word, ...]) -> str:
    """What jaxlib does at these flags instead of starting, "does not know" or "cannot read the
    value of"; empty if it starts. Tried in a process of its own (0.2 s), whose words decide: any
    other failure is left for the command itself to meet."""
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
        if tried.returncode:
            return next((why for said, why in _REFUSALS.items() if said in tried.stderr), "")
    return ""


def complaint(word: Word) -> str:
    """What is wrong with a flag at which jaxlib does not start, and which flags are near it."""
    unknown, why, near = _REFUSALS["Unknown flag"], refusal((word,)), []
    if why == unknown:
        near = difflib.get_close_matches(word.name, names(), n=3, cutoff=0.7)
        near = [name for name in near if refusal((Word(name, "?"),)) != unknown]
    hint = f"; did you mean --{' or --'.join(near)}?" if near else ""
    return f"{VARIABLE}: jaxlib {metadata.version('jaxlib')} {why} {word}{hint}"
