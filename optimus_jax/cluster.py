"""Joining a cluster of processes, and the CPU devices of each, before anything uses a device.

Importing this file does not import jax.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from optimus_jax import coordinator, launchers
from optimus_jax.errors import UserError
from optimus_jax.processes import ADDRESS, COUNT, DEVICES, RANK

_GPU = r"^GPU \d+:"  # a line of nvidia-smi -L
HEARTBEAT_S, WATCHED_S = 100, 900  # without a sign of life, jax ends all processes


def count() -> int:
    """How many processes a launcher started, this one included; 1 without a launcher."""
    text = os.environ.get(COUNT) or "1"
    return int(text) if text.isdecimal() else 1  # initialize() complains


def initialize(timeout_seconds: int = 300, watched: bool = False) -> None:
    """Join the cluster that the JAX_* variables describe; one process alone needs none of them.

    Commands that may run in several processes call this before anything uses a device. Where the
    launcher chose a number of devices per process, it takes effect here. A `watched` run
    asks at every step whether to stop (StopRequest) and has a Watchdog: jax only notes a SIGTERM,
    and waits longer for a silent process than the watchdog does, which says more.
    Raises UserError naming the variables.
    """
    for name in (DEVICES, COUNT, RANK):
        if not (os.environ.get(name) or "0").isdecimal():
            raise UserError(f"{name}={os.environ[name]} is not a whole number")
    if os.environ.get(DEVICES):
        configure_cpu_devices(int(os.environ[DEVICES]))
    values = {name: os.environ.get(name, "") for name in (ADDRESS, COUNT, RANK)}
    if not any(values.values()):
        return
    missing = [name for name, value in values.items() if not value]
    if missing:
        present = " and ".join(name for name, value in values.items() if value)
        raise UserError(f"{present} set but not {' and '.join(missing)}: set all three or none")
    count, rank = int(values[COUNT]), int(values[RANK])
    host, _, port = values[ADDRESS].rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f"{ADDRESS}={values[ADDRESS]} is not HOST:PORT")
    if not 0 <= rank < count:
        raise UserError(f"{RANK}={rank} is not one of 0 to {COUNT}-1, with {COUNT}={count}")
    if count == 1:
        return
    import jax

    if jax.distributed.is_initialized():
        return
    host = host.strip("[]")
    notes = coordinator.avoid_proxy(host), coordinator.only_here(host, count)
    for note in filter(None, notes if rank == 0 else ()):
        print(f"optimus_jax: {note}", file=sys.stderr, flush=True)
    with contextlib.suppress(AttributeError):  # an option that a jax may not have
        jax.config.update("jax_check_proxy_envs", False)  # it would warn of what is seen to
    if not rank:
        coordinator.require_free(int(port))
    try:
        if rank:
            coordinator.await_answer(host, int(port), timeout_seconds)
        jax.distributed.initialize(
            values[ADDRESS],
            count,
            rank,
            initialization_timeout=timeout_seconds,
            local_device_ids=local_devices(),
            heartbeat_timeout_seconds=WATCHED_S if watched else HEARTBEAT_S,
        )
    except Exception as error:
        described = ", ".join(f"{name}={value}" for name, value in values.items())
        reason = " ".join(str(error).split())
        raise UserError(f"cannot join the cluster of {described}: {reason}") from error
    sys.excepthook = functools.partial(_end_at_once, sys.excepthook)
    if not watched and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # jax only notes it, and nothing would end


def local_devices() -> list[int] | None:
    """The GPUs of this process; None for all that it sees.

    A launcher that starts a process for each GPU of a machine lets every process see all of them,
    or binds one to each. Raises UserError if there are fewer GPUs than processes, or if a machine's
    only process sees fewer GPUs than its job was given.
    """
    place = launchers.place()
    if place is None or os.environ.get(launchers.LOCAL_DEVICES) or platform() != "gpu":
        return None
    seen = _visible_gpus()
    if place.local_count == 1:
        given = int(os.environ.get("SLURM_GPUS_ON_NODE") or seen)
        if given > seen:
            raise UserError(
                f"{place}: the job has {given} GPUs on this machine, its only process sees {seen}:"
                f" start one process for each (--ntasks-per-node={given}), or do not bind GPUs to"
                " tasks (--gpus-per-task, --gpu-bind)"
            )
        return None
    if seen == 1:
        return [0]  # bound to it
    if seen < place.local_count:
        raise UserError(
            f"{place}: this machine shows {seen} GPUs to {place.local_count} processes: start"
            f" {seen} processes on each machine, or one"
        )
    return [place.local_rank]


def _visible_gpus() -> int:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([x for x in chosen.split(",") if x.strip()])
    return len(re.findall(_GPU, gpus(), re.MULTILINE))


def _end_at_once(report: Callable[..., None], kind: type, *error: Any) -> None:
    """For an uncaught error; jax's own exit would wait minutes for the other processes' exits."""
    report(kind, *error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(128 + signal.SIGINT if issubclass(kind, KeyboardInterrupt) else 1)


def configure_cpu_devices(count: int) -> None:
    """Where jax runs on the CPU, make it `count` devices; call it before any device is used."""
    if count < 1:
        raise ValueError(f"{count} devices per process; there must be at least 1")
    if runs_on_cpu():
        import jax

        jax.config.update("jax_num_cpu_devices", count)


def runs_on_cpu() -> bool:
    """Whether jax's default platform is the CPU, found out without starting a backend."""
    return platform() == "cpu"


def platform() -> str:
    """jax's default platform: cpu, gpu or tpu; neither imports jax nor starts a backend."""
    imported = sys.modules.get("jax")
    platforms: str | None = (
        imported.config.jax_platforms if imported else os.environ.get("JAX_PLATFORMS")
    )
    if platforms:
        first = platforms.split(",")[0].strip()
        return "gpu" if first in ("cuda", "rocm") else first
    tpus = glob.glob("/dev/accel[0-9]*") + glob.glob("/dev/vfio/[0-9]*")
    if tpus and importlib.util.find_spec("libtpu") is not None:
        return "tpu"
    return "gpu" if _has_cuda_plugin() and gpus() else "cpu"


def missing_cuda() -> str | None:
    """In words, that this machine has GPUs which jax cannot use for want of its CUDA plugin; None
    where all is well or JAX_PLATFORMS says cpu.

    Raises UserError inside a Slurm job that was given GPUs: it would hold them and train on CPUs.
    """
    if (os.environ.get("JAX_PLATFORMS") or "gpu").split(",")[0].strip() in ("cpu", "tpu"):
        return None
    if _has_cuda_plugin() or not gpus():
        return None
    count = len(re.findall(_GPU, gpus(), re.MULTILINE)) or 1
    text = f"{count} GPUs here, but jax has no CUDA plugin"
    help_ = "bash launch/setup.sh --cuda installs it, JAX_PLATFORMS=cpu says that CPUs are meant"
    given = os.environ.get("SLURM_GPUS_ON_NODE") or "0"
    if given.isdecimal() and int(given):
        raise UserError(f"{text}, and the job was given {given}: {help_}")
    return f"{text}: this runs on the CPU; {help_}"


def _has_cuda_plugin() -> bool:
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    return any(importlib.util.find_spec(name) for name in plugins)


@functools.cache
def gpus() -> str:
    """What nvidia-smi lists, a line for each GPU; empty without any."""
    try:
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=20, text=True)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 and "GPU" in answer.stdout else ""
