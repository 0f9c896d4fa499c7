"""Run one command in several processes on this machine; see `optimus_jax.processes.run_local`.

With OPTIMUS_LOGS=FOLDER each process's output is also in a file of its own, in a new folder there.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[1])
USAGE = "usage: python launch/local.py --processes=N [--no-pin] -- python -m optimus_jax.train ..."


def parse(arguments: list[str]) -> tuple[int, bool, list[str]] | None:
    """The number of processes, whether to pin them, and the command; None for wrong usage."""
    if "--" not in arguments:
        return None
    split = arguments.index("--")
    options, command = arguments[:split], arguments[split + 1 :]
    processes, pin = 0, True
    for option in options:
        name, _, value = option.partition("=")
        if option == "--no-pin":
            pin = False
        elif name == "--processes" and value.isdecimal():
            processes = int(value)
        else:
            return None
    return (processes, pin, command) if processes and command else None


def main(arguments: list[str]) -> int:
    parsed = parse(arguments)
    if parsed is None:
        print(USAGE, file=sys.stderr)
        return 2
    processes, pin, command = parsed
    if command[0] in ("python", "python3"):
        command = [sys.executable, *command[1:]]
    sys.path.insert(0, ROOT)
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([ROOT, inherited] if inherited else [ROOT])
    from optimus_jax import xla_flags
    from optimus_jax.errors import UserError
    from optimus_jax.processes import run_local

    try:
        xla_flags.apply()  # a wrong flag is said once, not by every process
        log_dir = None
        if logs := os.environ.get("OPTIMUS_LOGS"):
            log_dir = Path(logs, time.strftime(f"local-%Y%m%d-%H%M%S-{os.getpid()}"))
            os.environ.setdefault("OPTIMUS_TIMESTAMPS", "1")
        return run_local(command, processes, pin=pin, log_dir=log_dir)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
