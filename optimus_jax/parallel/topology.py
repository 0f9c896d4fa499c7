"""Which machines the axes of a plan cross, told from the processes that are really there."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import jax
import numpy as np

from optimus_jax.errors import UserError
from optimus_jax.parallel.agreement import gather
from optimus_jax.parallel.mesh import Meshes


def machines() -> list[str]:
    """The machine of each process, by its host name."""
    return list(map(str, gather(socket.gethostname())))


def by_machine(devices: Sequence[jax.Device], hosts: Sequence[str]) -> list[jax.Device]:
    """The devices machine by machine, in the order in which processes name machines first: ranks
    may be dealt out over machines in turn, and neighbours are to share one."""
    order = {host: n for n, host in enumerate(dict.fromkeys(hosts))}
    return sorted(devices, key=lambda d: (order[hosts[d.process_index]], d.process_index, d.id))


def crossed(meshes: Meshes, hosts: Sequence[str]) -> dict[str, int]:
    """Of the LLM's axes, on how many machines one group along the axis lies at most."""
    found, array = {}, meshes.llm.devices
    for n, axis in enumerate(meshes.llm.axis_names):
        groups = np.moveaxis(array, n, -1).reshape(-1, array.shape[n])
        found[str(axis)] = max(len({hosts[d.process_index] for d in group}) for group in groups)
    return found


def check(meshes: Meshes, hosts: Sequence[str]) -> None:
    """Raises UserError if tensor shards lie on several machines though each could have them all."""
    grid, count = meshes.grid, crossed(meshes, hosts)["tp"]
    held = [hosts[d.process_index] for d in meshes.llm.devices.flat]
    most = max(map(held.count, set(held)))
    if count > 1 and grid.tp <= most:
        raise UserError(
            f"tp {grid.tp} lies on {count} machines, with up to {most} devices of the run on each:"
            f" devices of a machine must be a multiple of tp; start the same number of processes,"
            " a multiple of tp by their devices, on every machine"
        )


def summary(meshes: Meshes, hosts: Sequence[str]) -> str:
    """Processes, devices, mesh and what its axes cross, in a few lines."""
    devices = list(meshes.llm.devices.flat)
    kinds = ", ".join(sorted({d.device_kind for d in devices}))
    names = list(dict.fromkeys(hosts))
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    shape = " x ".join(f"{axis} {n}" for axis, n in meshes.llm.shape.items())
    links = ", ".join(
        f"{axis} {'inside a machine' if count == 1 else f'over {count} machines'}"
        for axis, count in crossed(meshes, hosts).items()
        if meshes.llm.shape[axis] > 1
    )
    return (
        f"{_count(len(hosts), 'process', 'es')} on {_count(len(names), 'machine')} ({shown}),"
        f" {len(devices)} x {kinds};"
        f" mesh {shape}{': ' if links else ''}{links}"
    )


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"
