"""Meshes: one order of devices under several names."""

from __future__ import annotations

import types

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

from optimus_jax.errors import UserError
from optimus_jax.parallel.mesh import ENCODER_DATA, GRID_AXES, PIPE, Grid, make_meshes, spread


@pytest.mark.parametrize(("dp", "pp"), [(1, 1), (1, 4), (2, 1), (2, 2), (2, 4)])
def test_meshes_list_the_same_devices_in_the_same_order(dp: int, pp: int) -> None:
    meshes = make_meshes(Grid(dp, pp), jax.devices())
    order = jax.devices()[: dp * pp]
    for mesh in (meshes.llm, meshes.encoder, meshes.grid):
        assert list(mesh.devices.flat) == order
        assert mesh.size == dp * pp
    assert dict(meshes.llm.shape) == {"dp": dp, "pp": pp, "tp": 1}
    assert dict(meshes.encoder.shape) == {"dp": dp, "po": pp, "pp": 1, "to": 1, "tp": 1}
    assert dict(meshes.grid.shape) == {"dp": dp, "po": pp, "pi": 1, "to": 1, "ti": 1}
    assert meshes.grid.axis_names == GRID_AXES


SPECS = [  # the same cuts under the names of the LLM's mesh, the encoder's and the grid's
    (Spec(), Spec(), Spec()),
    (Spec("dp"), Spec("dp"), Spec("dp")),
    (Spec("pp"), Spec(("po", "pp")), Spec(PIPE)),
    (Spec(None, "pp"), Spec(None, "po"), Spec(None, "po")),
    (Spec(("dp", "pp", "tp")), Spec((*ENCODER_DATA, "pp", "tp")), Spec(GRID_AXES)),
    (Spec("dp", "pp"), Spec("dp", ("po", "pp")), Spec("dp", PIPE)),
]


@pytest.mark.parametrize("specs", SPECS, ids=str)
def test_an_array_passes_between_meshes_without_moving(specs: tuple[Spec, ...]) -> None:
    meshes = make_meshes(Grid(2, 4), jax.devices())
    named = [
        NamedSharding(mesh, spec)
        for mesh, spec in zip((meshes.llm, meshes.encoder, meshes.grid), specs, strict=True)
    ]
    array = np.arange(8 * 8.0).reshape(8, 8)
    maps = [sharding.devices_indices_map(array.shape) for sharding in named]
    assert maps[0] == maps[1] == maps[2]
    assert named[0].device_set == named[1].device_set == named[2].device_set
    on_llm = jax.device_put(array, named[0])
    on_encoder = jax.device_put(on_llm, named[1])
    places = [
        {shard.device: shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards}
        for x in (on_llm, on_encoder)
    ]
    assert places[0] == places[1]


def test_too_few_devices_are_refused_with_both_numbers() -> None:
    with pytest.raises(UserError, match="plan needs 16 devices, this machine shows 8"):
        make_meshes(Grid(4, 4), jax.devices())
    with pytest.raises(UserError, match=r"needs 3 devices.*shows 2:.*of at most 2"):
        spread(jax.devices()[:2], 3)


def fake_devices(*processes: int) -> list[types.SimpleNamespace]:
    """Devices that know the process they belong to and their number."""
    return [types.SimpleNamespace(process_index=p, id=k) for k, p in enumerate(processes)]


@pytest.mark.parametrize(
    ("processes", "count", "wanted"),
    [
        ((0, 0, 0, 0), 2, [0, 1]),
        ((0, 0, 0, 0, 1, 1, 1, 1), 4, [0, 1, 4, 5]),  # two of each
        ((0, 1, 0, 1), 2, [0, 1]),
        ((0, 1, 0, 1), 4, [0, 2, 1, 3]),  # in the order of processes
        ((0, 0, 0, 0, 1, 1, 1, 1), 3, [0, 1, 2]),  # does not divide
        ((0, 0, 0, 1), 4, [0, 1, 2, 3]),  # one process has too few for its share
        ((0, 0, 1, 1), 1, [0]),
    ],
)
def test_devices_are_spread_evenly_over_processes(
    processes: tuple[int, ...], count: int, wanted: list[int]
) -> None:
    assert [device.id for device in spread(fake_devices(*processes), count)] == wanted
