"""Devices of imagined machines: who is whose neighbour, and what a plan's axes cross."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from optimus_jax.errors import UserError
from optimus_jax.parallel.mesh import Grid, make_meshes
from optimus_jax.parallel.topology import by_machine, check, crossed, summary


@dataclasses.dataclass(frozen=True)
class Device:
    id: int
    process_index: int
    device_kind: str = "H100"
    platform: str = "gpu"


def meshes(grid: Grid, hosts: list[str], ordered: bool = True) -> Any:
    """One device for each process."""
    devices = [Device(n, n) for n in range(len(hosts))]
    return make_meshes(grid, by_machine(devices, hosts) if ordered else devices)  # type: ignore[arg-type]


IN_TURN = ["n1", "n2"] * 4


def test_devices_of_a_machine_are_neighbours_however_ranks_are_dealt_out() -> None:
    devices = [Device(n, n) for n in range(8)]
    ordered = by_machine(devices, IN_TURN)  # type: ignore[arg-type]
    assert [d.id for d in ordered] == [0, 2, 4, 6, 1, 3, 5, 7]


def test_what_axes_cross() -> None:
    grid = Grid(dp=1, pp=2, tp=4)
    assert crossed(meshes(grid, IN_TURN), IN_TURN) == {"dp": 1, "pp": 2, "tp": 1}
    assert crossed(meshes(grid, IN_TURN, ordered=False), IN_TURN) == {"dp": 1, "pp": 1, "tp": 2}


def test_tensor_shards_that_leave_a_machine_without_need_are_refused() -> None:
    grid = Grid(dp=1, pp=2, tp=4)
    check(meshes(grid, IN_TURN), IN_TURN)
    with pytest.raises(UserError, match="tp 4 lies on 2 machines, with up to 4 devices"):
        check(meshes(grid, IN_TURN, ordered=False), IN_TURN)
    check(meshes(Grid(1, 1, 8), IN_TURN), IN_TURN)  # no machine could hold them


def test_the_summary_names_machines_and_links() -> None:
    assert summary(meshes(Grid(dp=1, pp=2, tp=4), IN_TURN), IN_TURN) == (
        "8 processes on 2 machines (n1, n2), 8 x H100; mesh dp 1 x pp 2 x tp 4:"
        " pp over 2 machines, tp inside a machine"
    )
    assert summary(meshes(Grid(dp=1, pp=1), ["n1"]), ["n1"]) == (
        "1 process on 1 machine (n1), 1 x H100; mesh dp 1 x pp 1 x tp 1"
    )
