"""Several processes on one machine: started, looked after and joined into one jax cluster."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

ADDRESS = "JAX_COORDINATOR_ADDRESS"
COUNT = "JAX_NUM_PROCESSES"
RANK = "JAX_PROCESS_ID"
DEVICES = "OPTIMUS_DEVICES_PER_PROCESS"
# of the processes on one machine: which of them this is, and how many there are
LOCAL_RANK, LOCAL_COUNT = "OPTIMUS_LOCAL_RANK", "OPTIMUS_LOCAL_COUNT"

GRACE_SECONDS = 10.0
_DRAIN_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1
_SIGNALS = set(signal.Signals)

# A step's buffers are allocated anew for each step. Left to itself malloc hands them back to the
# system each time, and the first touch of every page costs more than the optimiser does (a step's
# end of 61 ms took 39). So: keep memory, in large pages. Known to glibc 2.35, else ignored.
TUNABLES = "GLIBC_TUNABLES"
_KEEP_MEMORY = ":".join(
    f"glibc.malloc.{name}"
    for name in ("hugetlb=1", "mmap_max=0", f"trim_threshold={1 << 34}", "arena_max=1")
)

# (rank, exit code) when a process has ended, (None, signal number) when we were signalled.
_Events = queue.SimpleQueue[tuple[int | None, int]]
_Log = IO[bytes] | None


def run_local(
    command: list[str],
    processes: int,
    devices_per_process: int | None = None,
    pin: bool = True,
    log_dir: str | os.PathLike[str] | None = None,
) -> int:
    """Run `command` in `processes` local processes that form one jax cluster.

    Returns 0, or the code of the first process that failed (128 + n where signal n ended it);
    a failure stops the others. Process 0 keeps our stdout and stderr; lines of process i > 0 go
    to our stderr as `[i] line`. With `log_dir` each process's lines go to its file process_i.log
    there too. Raises UserError if they cannot be written there.
    """
    if not command or processes < 1:
        raise ValueError("run_local needs a command and at least one process")
    sys.stdout.flush()
    sys.stderr.flush()
    environment = _cluster_environment(processes, devices_per_process)
    events: _Events = queue.SimpleQueue()
    children: list[_Child] = []
    with contextlib.ExitStack() as stack:
        logs = _logs(log_dir, processes, stack)
        stack.enter_context(_signals_to(events))
        try:
            for rank, prepared in enumerate(_prepared(command, processes, pin)):
                children.append(_Child(rank, prepared, environment, logs[rank], events))
            return _supervise(children, events)
        finally:
            for child in children:
                if child.process.returncode is None:
                    child.kill()
            for child in children:
                child.waiter.join()


def _logs(
    log_dir: str | os.PathLike[str] | None, processes: int, stack: contextlib.ExitStack
) -> list[_Log]:
    """A file for each process, open until the stack is left; None for each without a folder."""
    if log_dir is None:
        return [None] * processes
    try:
        Path(log_dir).mkdir(parents=True, exist_ok=True)
        paths = [Path(log_dir, f"process_{rank}.log") for rank in range(processes)]
        return [stack.enter_context(path.open("wb", buffering=0)) for path in paths]
    except OSError as error:
        from optimus_jax.errors import UserError  # not at the top: see _prepared

        why = f"{error.filename}: {error.strerror}"
        raise UserError(f"logs cannot be written to {log_dir}: {why}") from error


def _supervise(children: list[_Child], events: _Events) -> int:
    """Wait until every child has ended; the first failure's code, else 0."""
    running = dict(enumerate(children))
    failure = 0
    signalled = False
    deadline: float | None = None
    while running:
        try:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            rank, value = events.get(timeout=left)
        except queue.Empty:
            deadline, rank, signalled, value = None, None, True, signal.SIGKILL
        if rank is None:
            for child in running.values():
                child.kill() if signalled else child.process.send_signal(value)
            signalled = True
            continue
        del running[rank]
        if value and not failure:
            failure = value
            name = f" ({signal.Signals(value - 128).name})" if value - 128 in _SIGNALS else ""
            stopping = "; stopping the others" if running else ""
            said = f"process {rank} of {len(children)} failed with code {value}{name}{stopping}"
            print(f"optimus_jax: {said}", file=sys.stderr, flush=True)
            deadline = time.monotonic() + GRACE_SECONDS
            # Children that were already asked to stop may be saving; a repeat would cut that off.
            if not signalled:
                for child in running.values():
                    child.process.send_signal(signal.SIGTERM)
    return failure


class _Child:
    """One started process, with the threads that pass on its output and report its end."""

    def __init__(
        self, rank: int, command: list[str], env: dict[str, str], log: _Log, events: _Events
    ) -> None:
        self.rank, self.log = rank, log
        # A group of its own: Ctrl-C reaches it only through us, and its own children can be found.
        self.process = subprocess.Popen(
            command,
            env={**env, RANK: str(rank), LOCAL_RANK: str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if rank or log else None,
            stderr=subprocess.STDOUT if rank else subprocess.PIPE if log else None,
            process_group=0,
        )
        self.waiter = threading.Thread(target=self._wait, args=(events,), daemon=True)
        self.waiter.start()

    def kill(self) -> None:
        """End the process and all that it started, at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _wait(self, events: _Events) -> None:
        ours = sys.stderr if self.rank else sys.stdout
        outputs = (self.process.stdout, ours), (self.process.stderr, sys.stderr)
        relays = [
            threading.Thread(target=self._relay, args=output, daemon=True)
            for output in outputs
            if output[0]
        ]
        for relay in relays:
            relay.start()
        code = self.process.wait()
        self.kill()
        # Bounded, for something that left the group may still hold the pipe open.
        for relay in relays:
            relay.join(_DRAIN_SECONDS)
        events.put((self.rank, code if code >= 0 else 128 - code))

    def _relay(self, pipe: IO[bytes], to: IO[str]) -> None:
        # The pipe is read to its end whatever happens to our own, or the process would block.
        for line in pipe:
            with contextlib.suppress(OSError, ValueError):
                if self.log:
                    self.log.write(line)
            with contextlib.suppress(OSError, ValueError):
                text = line.decode(errors="replace")
                if self.rank:
                    text = f"[{self.rank}] " + text.rstrip("\r\n") + "\n"
                to.write(text)
                to.flush()


def _cluster_environment(processes: int, devices: int | None) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    # jax's coordinator would listen on every interface if it were not told otherwise.
    environment = {**os.environ, ADDRESS: address, "JAX_COORDINATOR_BIND_ADDRESS": address}
    environment[COUNT] = environment[LOCAL_COUNT] = str(processes)
    environment.setdefault(TUNABLES, _KEEP_MEMORY)
    if devices is not None:
        environment[DEVICES] = str(devices)
    return environment


def _prepared(command: list[str], processes: int, pin: bool) -> Iterator[list[str]]:
    """`command` for each process, run by way of this file as a script: see `_become`."""
    cores = sorted(os.sched_getaffinity(0)) if pin and hasattr(os, "sched_getaffinity") else []
    for rank in range(processes):
        core = str(cores[rank]) if len(cores) >= processes else "any"
        yield [sys.executable, "-I", "-S", __file__, core, str(os.getpid()), *command]


@contextlib.contextmanager
def _signals_to(events: _Events) -> Iterator[None]:
    """Put SIGINT and SIGTERM into `events`; only the main thread may set handlers."""
    in_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if in_main else ()
    before = {n: signal.signal(n, lambda number, _: events.put((None, number))) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _become(core: str, parent: str, *command: str) -> None:
    """In the new process: bind it to its core and to its parent's life, then run the command."""
    if core != "any":
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {int(core)})
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):
            sys.exit("the launcher has ended")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"optimus_jax: cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    _become(*sys.argv[1:])
