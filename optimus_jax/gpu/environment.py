"""An environment of its own with the compiler for GPUs, built on first use.

Where jax finds its CUDA plugin without the CUDA libraries, every ordinary run complains. So the
plugin is not among the project's requirements: it lives in `.venv-gpu`, beside the project's own
environment, and what needs it is executed there. No GPU, driver or CUDA library is needed to
compile, only `ptxas` and `libdevice`: from a CUDA toolkit or, without one, from NVIDIA's packages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from typing import NoReturn

from optimus_jax.errors import UserError

ROOT = pathlib.Path(__file__).resolve().parents[2]
NAME = ".venv-gpu"
NEWEST = "newest"  # in place of a version: whatever the package index offers

COMPILER = ("jax", "jax-cuda13-plugin", "jax-cuda13-pjrt")  # one version
PROJECT = ("absl-py", "flax", "ml-collections", "numpy", "optax")  # what compiling a step imports
ASSEMBLER = ("nvidia-nvvm", "nvidia-cuda-nvcc", "nvidia-cuda-crt")
CUDA = 13  # the major version that the plugin is for
STAMP = "complete.txt"
UNREACHABLE = r"NewConnectionError|ConnectTimeoutError"  # in what pip says of an index
NO_INDEX = "no package index can be reached"

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Environment:
    """Where it is, the interpreter that it is made from, and what pip puts into it; `assembler`
    without dependencies, which would be CUDA's libraries."""

    folder: pathlib.Path
    base: str
    requirements: tuple[str, ...]
    assembler: tuple[str, ...] = ()

    @property
    def python(self) -> pathlib.Path:
        return self.folder / "bin" / "python"

    @property
    def stamp(self) -> str:
        """What a complete environment says of itself: anything else is built anew."""
        return "\n".join([self.base, *self.requirements, *self.assembler, ""])

    @property
    def complete(self) -> bool:
        file = self.folder / STAMP
        return self.python.exists() and file.is_file() and file.read_text() == self.stamp


def is_one(prefix: str = sys.prefix) -> bool:
    """Whether a Python of this prefix, by default this one, is that of such an environment."""
    folder = pathlib.Path(prefix).resolve()
    return folder.parent == ROOT and folder.name.startswith(NAME)


def environment(version: str = "") -> Environment:
    """The environment for a version of jax, by default the one that this process has; every other
    has a folder of its own. `newest` takes the newest of all that it installs.

    Raises UserError if that needs a newer Python than there is.
    """
    if not re.fullmatch(rf"|{NEWEST}|\d+(\.\d+)+", version):
        raise UserError(f"--jax={version}: give a version such as 0.10.2, or {NEWEST}")
    own = metadata.version("jax")
    assembler = () if has_toolkit() else ASSEMBLER
    if version in ("", own):
        pins = [f"{name}=={own}" for name in COMPILER]
        pins += [f"{name}=={metadata.version(name)}" for name in PROJECT]
        return Environment(ROOT / NAME, _own_python(), tuple(pins), assembler)
    wanted = "" if version == NEWEST else f"=={version}"
    pins = [f"{name}{wanted}" for name in COMPILER] + list(PROJECT)
    return Environment(ROOT / f"{NAME}-{version}", newest_python(), tuple(pins), assembler)


def _own_python() -> str:
    """The interpreter that the running environment was made from."""
    base = getattr(sys, "_base_executable", None) or sys.executable
    return os.path.realpath(base)


def newest_python() -> str:
    """The newest Python of this machine from 3.12 on, which jax after 0.10 needs. PYTHON names one.

    Raises UserError if there is none.
    """
    named = os.environ.get("PYTHON")
    versions = range(20, 11, -1)
    candidates = [named] if named else [shutil.which(f"python3.{n}") for n in versions]
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv")) / "versions"
    for n in () if named else versions:
        candidates += sorted(map(str, pyenv.glob(f"3.{n}.*/bin/python3.{n}")))
    probe = "import sys, venv; sys.exit(sys.version_info < (3, 12))"
    for candidate in filter(None, candidates):
        with contextlib.suppress(OSError):
            if not subprocess.run([candidate, "-c", probe], capture_output=True).returncode:
                return os.path.realpath(candidate)
    found = f"PYTHON={named} is not one" if named else "none is on PATH or in pyenv"
    raise UserError(f"a jax of another version is installed with Python 3.12 or newer; {found}")


def has_toolkit() -> bool:
    """Whether there is a CUDA toolkit where XLA looks for one, and of the plugin's version."""
    for root in (os.environ.get("CUDA_ROOT"), "/usr/local/cuda", "/opt/cuda"):
        if not root or not pathlib.Path(root, "nvvm/libdevice/libdevice.10.bc").is_file():
            continue
        with contextlib.suppress(OSError):
            line = [str(pathlib.Path(root, "bin/ptxas")), "--version"]
            said = subprocess.run(line, capture_output=True, text=True).stdout
            release = re.search(r"release (\d+)", said)
            if release and int(release[1]) == CUDA:
                return True
    return False


def build(wanted: Environment, say: Say) -> None:
    """Builds what is not complete; a half-built one is built anew. Processes that want the same one
    take turns. `say` tells people what happens.

    Raises UserError with pip's last words if packages cannot be had.
    """
    if wanted.complete:
        return
    with _turn(wanted.folder):
        if wanted.complete:  # another process was faster
            return
        size = "1.4 GB" if wanted.assembler else "1.1 GB"
        say(
            f"building {wanted.folder.name} for {' '.join(wanted.requirements[:3])}:"
            f" about a minute and {size}, once"
        )
        began = time.monotonic()
        _run([wanted.base, "-m", "venv", "--clear", str(wanted.folder)], wanted)
        pip = [str(wanted.python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        _run([*pip, "--no-input", *wanted.requirements], wanted)
        if wanted.assembler:
            _run([*pip, "--no-input", "--no-deps", *wanted.assembler], wanted)
        (wanted.folder / STAMP).write_text(wanted.stamp)
        say(f"{wanted.folder.name} is complete after {time.monotonic() - began:.0f} s")


@contextlib.contextmanager
def _turn(folder: pathlib.Path) -> Iterator[None]:
    with open(folder.with_name(folder.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(line: Sequence[str], wanted: Environment) -> None:
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr + done.stdout).strip().splitlines()
        errors = [text for text in said if text.startswith("ERROR")] or said[-3:]
        if re.search(UNREACHABLE, done.stderr):  # pip itself ends by saying that it found nothing
            errors.append(NO_INDEX)
        raise UserError(
            "\n".join([f"{wanted.folder.name} cannot be built; `{' '.join(line)}` says:", *errors])
        )


def execute(wanted: Environment, module: str, words: Sequence[str]) -> NoReturn:
    """Replaces this process by `python -m module words` in the environment."""
    sys.stdout.flush()
    sys.stderr.flush()
    line = [str(wanted.python), "-m", module, *words]
    os.execve(line[0], line, variables(wanted))


def variables(wanted: Environment) -> dict[str, str]:
    """The variables of a process in the environment. The CPU is jax's platform there, since the
    plugin finds no GPU; the project is found from every folder. XLA's complaints of slow compiles
    are not shown; its errors come as exceptions."""
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "3"),
        "PYTHONPATH": os.pathsep.join(paths),
        "VIRTUAL_ENV": str(wanted.folder),
    }
