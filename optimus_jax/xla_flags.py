"""python -m optimus_jax.xla_flags: what runs set for XLA, NCCL and CUDA, why, and what holds.

    python -m optimus_jax.xla_flags --platform=gpu --generation=h100
    XLA_FLAGS="$(python -m optimus_jax.xla_flags --export)"   # the flags alone
    eval "$(python -m optimus_jax.xla_flags --export_all)"    # flags and variables

XLA ends the process at a flag that it does not know and at a value that it cannot read. So every
command that runs a step calls `apply` before jax is imported: it says in words what is wrong with
the user's XLA_FLAGS, and adds the settings of the table (optimus_jax/gpu_settings.py) that the user
has not set. Asynchronous collectives, their high-priority stream and the speed-of-light latency
estimator are XLA's defaults and not repeated there; scheduling groups are annotations of the
program, no version has a flag for them.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import pathlib
import re
import shlex
import sys
from collections.abc import Iterable
from importlib import metadata

from optimus_jax import cluster
from optimus_jax.errors import UserError
from optimus_jax.gpu_settings import TABLE, Setting
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
OURS = "OPTIMUS_SETTINGS"  # names of what `apply` has set, for the processes that inherit it
_PREFIX = "NCCL_"


def settings(
    platform: str, generation: str | None = None, version: tuple[int, ...] | None = None
) -> list[Setting]:
    """The rows of the table for a platform, a GPU generation and a jaxlib (default: the installed
    one)."""
    version = version or jaxlib_version()
    found: dict[str, Setting] = {}
    for row in TABLE:
        if row.platform != platform or row.generation not in (None, generation):
            continue
        if row.since <= version < row.before and (row.generation or row.name not in found):
            found[row.name] = row
    return list(found.values())


def flags(
    platform: str, generation: str | None = None, version: tuple[int, ...] | None = None
) -> list[Setting]:
    """Those rows that are flags of XLA."""
    return [row for row in settings(platform, generation, version) if row.is_flag]


def variables(
    platform: str, generation: str | None = None, version: tuple[int, ...] | None = None
) -> list[Setting]:
    """Those rows that are environment variables."""
    return [row for row in settings(platform, generation, version) if not row.is_flag]


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


def additions(platform: str, generation: str | None = None) -> dict[str, str]:
    """The environment variables of the table that the user has set under none of their names,
    neither in the environment nor in a file that NCCL reads."""
    theirs = os.environ.keys() | _of_nccls_files().keys()
    rows = variables(platform, generation)
    return {row.name: row.value for row in rows if not theirs & {row.name, *row.aliases}}


def apply() -> None:
    """Sets XLA_FLAGS to the user's and the table's flags for this machine, and the table's
    variables that the user has not set; to be called before jax is imported. Does nothing without
    jaxlib. Raises UserError as `merged` does."""
    if importlib.util.find_spec("jaxlib"):
        for name, value in _changes(cluster.platform(), generation(cluster.gpus())).items():
            os.environ[name] = value


def _changes(platform: str, generation: str | None) -> dict[str, str]:
    """What `apply` changes in the environment."""
    users, value = os.environ.get(VARIABLE, ""), merged(platform, generation)
    added = additions(platform, generation)
    names = {word.name for word in parse(value)} - {word.name for word in parse(users)}
    if names or added:
        before = filter(None, os.environ.get(OURS, "").split(","))
        added[OURS] = ",".join(sorted({*before, *names, *added}))
    return {VARIABLE: value, **added} if value != users else added


def of_this_run() -> str:
    """What holds in this process on this machine's GPUs, in one line: how many flags of XLA are the
    table's and how many the user's, and the variables of the table and of NCCL with their values;
    empty without GPUs or settings."""
    if cluster.platform() != "gpu":
        return ""
    ours = set(os.environ.get(OURS, "").split(","))
    words = parse(os.environ.get(VARIABLE, ""))
    of_table = sum(word.name in ours for word in words)
    parts = [f"XLA_FLAGS {of_table} of the table + {len(words) - of_table} yours"] if words else []
    named = {name for row in TABLE if not row.is_flag for name in (row.name, *row.aliases)}
    values = {**_of_nccls_files(), **os.environ}
    for name in sorted(values):
        if name in named or name.startswith(_PREFIX):
            parts.append(f"{name}={values[name]}" + ("" if name in ours else " (yours)"))
    return f"settings: {', '.join(parts)}" if parts else ""


def _of_nccls_files() -> dict[str, str]:
    """What the user and the administrator have set for NCCL in its files, the user's first.

    Source: NVIDIA/nccl src/misc/param.cc. NCCL lets the environment win over them.
    """
    found: dict[str, str] = {}
    own = os.environ.get("NCCL_CONF_FILE") or os.path.expanduser("~/.nccl.conf")
    for path in (own, "/etc/nccl.conf"):
        try:
            lines = pathlib.Path(path).read_text(errors="replace").splitlines()
        except OSError:
            continue
        for name, equals, value in (line.partition("=") for line in lines):
            if equals and not name.startswith("#"):
                found.setdefault(name, value)
    return found


def describe(platform: str, generation: str | None = None) -> str:
    """A line for each row of the table: value, whether the user's own holds or jaxlib does not
    know it, reason and source. Then what the user has set for NCCL beside it."""
    users = {word.name: word for word in parse(os.environ.get(VARIABLE, ""))}
    values = {**_of_nccls_files(), **os.environ}
    lines, named = [], set()
    for row in settings(platform, generation):
        note = ""
        if row.is_flag:
            if row.name in users and str(users[row.name]) != str(row):
                note = f" (left out: you set {users[row.name]})"
            elif not known(row.name):
                note = f" (left out: unknown to jaxlib {metadata.version('jaxlib')})"
        else:
            named |= {row.name, *row.aliases}
            theirs = [f"{n}={values[n]}" for n in (row.name, *row.aliases) if n in values]
            if theirs and theirs != [str(row)]:
                note = f" (left out: you set {', '.join(theirs)})"
        lines.append(f"{row}{note}: {row.reason} [{row.source}]")
    others = sorted(n for n in values if n.startswith(_PREFIX) and n not in named)
    lines += [f"{name}={values[name]}: yours, passed on" for name in others]
    return "\n".join(lines) or f"no settings for {platform}"


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
    parser.add_argument(
        "--export_all", action="store_true", help="print lines for a shell that set everything"
    )
    asked = parser.parse_args(None if arguments is None else list(arguments))
    try:
        where = asked.platform, asked.generation
        if asked.export_all:
            for name, value in _changes(*where).items():
                print(f"export {name}={shlex.quote(value)}")
        else:
            value = merged(*where)  # which checks the user's flags
            print(value if asked.export else describe(*where))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
