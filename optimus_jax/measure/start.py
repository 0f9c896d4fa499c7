"""One process for each device, each on a core of its own: how timings run on CPUs."""

from __future__ import annotations

import os
import sys

from absl import flags

from optimus_jax import cluster, command, processes
from optimus_jax.config import Config
from optimus_jax.errors import UserError


def define_processes() -> None:
    """Declares --processes=N."""
    flags.DEFINE_integer(
        "processes", 0, "Processes, one for each device (default: as many as the plan needs)."
    )


def wrong_processes(config: Config) -> list[str]:
    """What is wrong with --processes, in words."""
    p, count = config.parallel, flags.FLAGS.processes
    if count in (0, p.devices):
        return []
    tensor = f" x tp {p.tp}" if p.tp > 1 else ""
    return [
        f"--processes={count}: the plan has {p.devices} devices (dp {p.dp} x pp {p.pp}{tensor}),"
        f" and each is to have a process of its own: pass --processes={p.devices} or change the"
        " plan"
    ]


def start(module: str, config: Config, crowded: bool = False) -> int | None:
    """Starts the processes, runs `module` in each and returns their exit code; in one of them,
    joins the others and returns None. A warning says if they share cores, unless `crowded` is meant
    to be fine. Raises UserError for a cluster of another size.
    """
    devices = config.parallel.devices
    if devices > 1 and cluster.count() == 1:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else devices
        if devices > cores and not crowded:
            command.say(
                f"{devices} processes share {cores} cores: their times say little about a machine"
                " that has a core for each"
            )
        return processes.run_local([sys.executable, "-m", module, *sys.argv[1:]], devices)
    if cluster.count() != devices:
        raise UserError(f"{cluster.count()} processes were started, the plan has {devices} devices")
    cluster.configure_cpu_devices(1)
    cluster.initialize()
    return None
