"""Which process of a job this is, from the environments that launchers really make."""

from __future__ import annotations

import pytest

from optimus_jax.errors import UserError
from optimus_jax.launchers import Place, adopt, first_node, note, place, tasks_of_node

SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_NODELIST": "node[003-004],x1",
    "SLURM_NTASKS": "20",
    "SLURM_STEP_NUM_TASKS": "20",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2),4",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "JAX_COORDINATOR_ADDRESS": "first:61999",
}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "5",
    "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29400",
}
NODES = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "optimus-jax-train-0-0.optimus-jax"}
OWN = {
    "JAX_COORDINATOR_ADDRESS": "a:1",
    "JAX_NUM_PROCESSES": "2",
    "JAX_PROCESS_ID": "1",
}


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        (SLURM, Place("Slurm", "node003:61586", 20, 9, 1, 8)),
        (OPEN_MPI, Place("Open MPI", "first:61999", 4, 3, 1, 2)),
        (TORCHRUN, Place("torchrun", "head:29401", 16, 5, 5, 8)),
        (
            NODES,
            Place("NNODES and NODE_RANK", "optimus-jax-train-0-0.optimus-jax:55527", 2, 1),
        ),
        (OWN, Place("JAX_* variables", "a:1", 2, 1)),
        ({**SLURM, **OWN}, Place("JAX_* variables", "a:1", 2, 1)),
        ({**SLURM, **OPEN_MPI}, Place("Open MPI", "first:61999", 4, 3, 1, 2)),
        ({**SLURM, **TORCHRUN}, Place("torchrun", "head:29401", 16, 5, 5, 8)),
        ({**SLURM, "JAX_COORDINATOR_PORT": "7"}, Place("Slurm", "node003:7", 20, 9, 1, 8)),
        ({**NODES, "MASTER_ADDR": "h:9"}, Place("NNODES and NODE_RANK", "h:9", 2, 1)),
    ],
    ids=[
        "slurm",
        "open mpi",
        "torchrun",
        "nodes",
        "own",
        "own first",
        "mpi in slurm",
        "torchrun in slurm",
        "own port",
        "with port",
    ],
)
def test_every_launchers_process_knows_its_place(
    environment: dict[str, str], wanted: Place
) -> None:
    assert place(environment) == wanted
    adopted = dict(environment)
    adopt(adopted)
    names = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
    assert tuple(adopted[name] for name in names) == (
        wanted.coordinator,
        str(wanted.count),
        str(wanted.rank),
    )
    again = place(adopted)
    assert again is not None
    assert (again.local_rank, again.local_count) == (wanted.local_rank, wanted.local_count)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"NNODES": "1", "NODE_RANK": "0"},
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "x"},
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"},
    ],
)
def test_one_process_needs_no_cluster(environment: dict[str, str]) -> None:
    assert place(environment) is None
    before = dict(environment)
    adopt(environment)
    assert environment == before


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"NNODES": "2", "NODE_RANK": "0"}, "NNODES=2 without JAX_COORDINATOR_ADDRESS"),
        ({**NODES, "NODE_RANK": "2"}, "process 2 of 2"),
        ({**SLURM, "SLURM_PROCID": "x"}, "SLURM_PROCID=x is not a whole number"),
        (
            {k: v for k, v in OPEN_MPI.items() if k != "JAX_COORDINATOR_ADDRESS"},
            "mpirun -x JAX_COORDINATOR_ADDRESS=HOST:PORT",
        ),
    ],
)
def test_what_makes_no_sense_is_said(environment: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        place(environment)


def test_running_alone_within_a_job_is_noted() -> None:
    """As `plan` does in a shell of salloc."""
    alone = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}
    assert place(alone) is None
    assert "job 7 has 4 tasks, and this process is none of them" in str(note(alone))
    assert note(SLURM) is note({}) is note({**alone, "SLURM_NTASKS": "1"}) is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("node[003-004],x1", "node003"),
        ("node[7,9-12]", "node7"),
        ("a[1-2]-ib,b", "a1-ib"),
    ],
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_tasks_of_each_node() -> None:
    assert [tasks_of_node("8(x2),4", n) for n in range(4)] == [8, 8, 4, 4]
    assert tasks_of_node("2", 0) == 2
