"""Which process of a job this is, told from what launchers put into the environment.

Slurm's srun, Open MPI's mpirun, torchrun and plain variables (NNODES and NODE_RANK, as containers
and JobSets set) each have names of their own; `adopt` turns them into the variables that all else
here reads: JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID. Importing this file does not
import jax.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, MutableMapping

from optimus_jax.errors import UserError
from optimus_jax.processes import ADDRESS, COUNT, LOCAL_COUNT, LOCAL_RANK, RANK

PORT = "JAX_COORDINATOR_PORT"
LOCAL_DEVICES = "JAX_LOCAL_DEVICE_IDS"  # read by jax itself
_TORCH_PORT = 29500  # torchrun's own default, at which its store listens
_KUBERNETES_PORT = 55527


@dataclasses.dataclass(frozen=True)
class Place:
    """A process of a job. `coordinator` is HOST:PORT of process 0; of `local_count` processes on
    this machine it is number `local_rank`."""

    launcher: str
    coordinator: str
    count: int
    rank: int
    local_rank: int = 0
    local_count: int = 1

    def __str__(self) -> str:
        here = f"{self.local_rank} of {self.local_count} on this machine"
        return f"{self.launcher}: process {self.rank} of {self.count}, {here}"


def place(environ: Mapping[str, str] | None = None) -> Place | None:
    """What the launcher of this process says; None without one.

    Raises UserError, naming the variables, if they do not make sense together.
    """
    environ = os.environ if environ is None else environ
    # mpirun and torchrun may themselves be started by srun, and hand its variables on
    for read in (_own, _open_mpi, _torchrun, _slurm, _nodes):
        if (found := read(environ)) is not None:
            if not 0 <= found.rank < found.count:
                raise UserError(f"{found.launcher}: process {found.rank} of {found.count}")
            return found
    return None


def note(environ: Mapping[str, str] | None = None) -> str | None:
    """What somebody should hear who runs alone inside a Slurm job of several tasks."""
    environ = os.environ if environ is None else environ
    tasks = environ.get("SLURM_NTASKS", "1")
    if not environ.get("SLURM_JOB_ID") or tasks == "1" or place(environ):
        return None
    return (
        f"Slurm job {environ['SLURM_JOB_ID']} has {tasks} tasks, and this process is none of them:"
        " it runs alone; srun starts it in all of them"
    )


def adopt(environ: MutableMapping[str, str] | None = None) -> Place | None:
    """Sets the JAX_* variables to this process's place in its job, where a launcher has one."""
    environ = os.environ if environ is None else environ
    found = place(environ)
    if found is not None and found.launcher != _OWN:
        environ[ADDRESS], environ[COUNT] = found.coordinator, str(found.count)
        environ[RANK] = str(found.rank)
        environ[LOCAL_RANK], environ[LOCAL_COUNT] = str(found.local_rank), str(found.local_count)
    return found


_OWN = "JAX_* variables"


def _own(environ: Mapping[str, str]) -> Place | None:
    if not (environ.get(COUNT) or environ.get(RANK)):
        return None
    # cluster.initialize says what is missing or wrong
    count, rank = (environ.get(name) or "" for name in (COUNT, RANK))
    if not (count.isdecimal() and rank.isdecimal() and int(rank) < int(count)):
        return Place(_OWN, environ.get(ADDRESS, ""), 1, 0)
    local = _number(environ, LOCAL_RANK, 0), _number(environ, LOCAL_COUNT, 1)
    return Place(_OWN, environ.get(ADDRESS, ""), int(count), int(rank), *local)


def _slurm(environ: Mapping[str, str]) -> Place | None:
    """A task of srun (a batch script itself has no SLURM_STEP_NODELIST)."""
    names = "SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_NTASKS"
    if not all(environ.get(name) for name in names):
        return None
    count = _number(environ, "SLURM_STEP_NUM_TASKS", _number(environ, "SLURM_NTASKS", 1))
    if count == 1:
        return None
    # as jax itself chooses it, so that mixed versions agree
    port = environ.get(PORT) or str(61440 + _number(environ, "SLURM_JOB_ID", 0) % 4096)
    first = first_node(environ["SLURM_STEP_NODELIST"])
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "1")
    on_node = tasks_of_node(tasks, _number(environ, "SLURM_NODEID", 0))
    return Place(
        "Slurm",
        environ.get(ADDRESS) or f"{first}:{port}",
        count,
        _number(environ, "SLURM_PROCID", 0),
        _number(environ, "SLURM_LOCALID", 0),
        on_node,
    )


def _open_mpi(environ: Mapping[str, str]) -> Place | None:
    names = "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"
    if not all(environ.get(name) for name in names):
        return None
    count = _number(environ, names[0], 1)
    if count == 1:
        return None
    here = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", 1)
    address = environ.get(ADDRESS)
    if not address:
        if here < count:
            raise UserError(
                f"Open MPI started {count} processes on several machines, and none knows where"
                f" process 0 is: mpirun -x {ADDRESS}=HOST:PORT with the first host's name, as"
                " launch/openmpi.sh does"
            )
        # of one machine: a port that all its processes compute alike and other jobs do not
        job = environ.get("OMPI_MCA_ess_base_jobid") or environ.get("PMIX_NAMESPACE") or "0"
        address = f"127.0.0.1:{61440 + sum(map(ord, job)) * 37 % 4096}"
    return Place(
        "Open MPI",
        address,
        count,
        _number(environ, names[1], 0),
        _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK", 0),
        here,
    )


def _torchrun(environ: Mapping[str, str]) -> Place | None:
    names = "RANK", "WORLD_SIZE", "MASTER_ADDR"
    if not all(environ.get(name) for name in names):
        return None
    count = _number(environ, "WORLD_SIZE", 1)
    if count == 1:
        return None
    # the next port: at its own torchrun's store listens
    port = environ.get(PORT) or str(_number(environ, "MASTER_PORT", _TORCH_PORT) + 1)
    return Place(
        "torchrun",
        environ.get(ADDRESS) or f"{environ['MASTER_ADDR']}:{port}",
        count,
        _number(environ, "RANK", 0),
        _number(environ, "LOCAL_RANK", 0),
        _number(environ, "LOCAL_WORLD_SIZE", 1),
    )


def _nodes(environ: Mapping[str, str]) -> Place | None:
    """A process for each machine; the coordinator may come without a port."""
    if not (environ.get("NNODES") and environ.get("NODE_RANK")):
        return None
    count = _number(environ, "NNODES", 1)
    if count == 1:
        return None
    address = environ.get(ADDRESS) or environ.get("MASTER_ADDR", "")
    if not address:
        raise UserError(f"NNODES={count} without {ADDRESS} (or MASTER_ADDR): where is process 0?")
    if ":" not in address:
        address = f"{address}:{environ.get(PORT) or _KUBERNETES_PORT}"
    return Place("NNODES and NODE_RANK", address, count, _number(environ, "NODE_RANK", 0))


def first_node(nodes: str) -> str:
    """The first name of Slurm's list: node[003-004,9],x1 begins with node003."""
    found = re.match(r"([^\[,]*)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", nodes)
    assert found
    return "".join(part or "" for part in found.groups())


def tasks_of_node(tasks: str, node: int) -> int:
    """How many tasks Slurm's list gives a node: 8(x2),4 are 8, 8 and 4."""
    counts: list[int] = []
    for part in tasks.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not found:
            return 1
        counts += [int(found[1])] * int(found[2] or 1)
    return counts[min(node, len(counts) - 1)]


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name)
    if not text:
        return default
    if not text.isdecimal():
        raise UserError(f"{name}={text} is not a whole number")
    return int(text)
