"""Meshes: one order of devices under several names."""

from __future__ import annotations

import types

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

from optimus_jax.errors import UserError
from optimus_jax.parallel.mesh import EncoderGrid, Grid, make_meshes, spread

FIGURE_5 = Grid(
    1, 4, 2, (EncoderGrid("vision", 2, 2),)
)  # of Optimus: an encoder (dp 2, pp 2, tp 2)
TWO = Grid(1, 4, 2, (EncoderGrid("vision", 2, 1), EncoderGrid("sound", 1, 2)))


@pytest.mark.parametrize(
    ("grid", "shape", "encoders"),
    [
        (Grid(1, 1), (1, 1, 1, 1, 1), [(1, 1, 1, 1, 1)]),
        (Grid(2, 4), (2, 4, 1, 1, 1), [(2, 4, 1, 1, 1)]),
        (Grid(2, 2, 2), (2, 2, 1, 2, 1), [(2, 2, 1, 2, 1)]),
        (FIGURE_5, (1, 2, 2, 1, 2), [(1, 2, 2, 1, 2)]),
        (TWO, (1, 2, 2, 1, 1, 2, 1), [(1, 2, 2, 2, 1), (1, 4, 1, 1, 2)]),
    ],
    ids=str,
)
def test_meshes_list_the_same_devices_in_the_same_order(
    grid: Grid, shape: tuple[int, ...], encoders: list[tuple[int, ...]]
) -> None:
    meshes = make_meshes(grid, jax.devices())
    order = jax.devices()[: grid.size]
    for mesh in (meshes.mesh, meshes.llm, *meshes.encoders.values()):
        assert list(mesh.devices.flat) == order
        assert mesh.size == grid.dp * grid.pp * grid.tp
    assert dict(meshes.llm.shape) == {"dp": grid.dp, "pp": grid.pp, "tp": grid.tp}
    names = ("dp", "po", "pp", "to", "tp")
    found = {name: dict(mesh.shape) for name, mesh in meshes.encoders.items()}
    wanted = [dict(zip(names, sizes, strict=True)) for sizes in encoders]
    assert found == dict(zip((e.name for e in grid.encoders), wanted, strict=True))
    assert meshes.mesh.devices.shape == tuple(grid.shape.values())
    sizes = [n for n in meshes.mesh.devices.shape if n > 1]
    assert sizes == [n for n in shape if n > 1]
    assert meshes.of("llm") is meshes.llm
    assert meshes.of("vision") is meshes.encoders["vision"]


def test_an_encoder_has_the_innermost_axes_and_the_rest_is_its_data_parallelism() -> None:
    grid = Grid(2, 12, 8, (EncoderGrid("a", 2, 4), EncoderGrid("b", 6, 2), EncoderGrid("c", 1, 1)))
    assert grid.size == 2 * 12 * 8
    sizes = [(grid.extent(grid.stages_of(k)), grid.extent(grid.shards_of(k))) for k in range(3)]
    assert sizes == [(2, 4), (6, 2), (1, 1)]
    assert grid.extent(grid.pipe) == 12 and grid.extent(grid.tensor) == 8
    assert grid.axes == ("dp", *grid.pipe, *grid.tensor)
    for k, replicas in enumerate((2 * 6 * 2, 2 * 2 * 4, 2 * 12 * 8)):
        own = grid.stages_of(k) + grid.shards_of(k)
        assert grid.stages_of(k) == grid.pipe[-len(grid.stages_of(k)) :]
        assert grid.shards_of(k) == grid.tensor[-len(grid.shards_of(k)) :]
        assert grid.extent(grid.replicas_of(k)) == replicas
        assert {*grid.replicas_of(k), *own} == {*grid.axes}
        assert grid.extent(grid.lanes_of(k)) == 8 // sizes[k][1]


@pytest.mark.parametrize(
    ("pp", "tp", "encoders", "wanted"),
    [
        (4, 1, [(3, 1)], "4 is no multiple of 3"),
        (6, 1, [(2, 1), (3, 1)], "3 is no multiple of 2"),
        (1, 4, [(1, 8)], "4 is no multiple of 8"),
        (1, 12, [(1, 4), (1, 6)], "6 is no multiple of 4"),
    ],
)
def test_sizes_that_no_grid_refines_are_refused(
    pp: int, tp: int, encoders: list[tuple[int, int]], wanted: str
) -> None:
    with pytest.raises(ValueError, match=f"{wanted}: no grid has both"):
        Grid(1, pp, tp, tuple(EncoderGrid(str(k), *e) for k, e in enumerate(encoders)))


SPECS = [  # the same cuts under the names of the LLM's mesh, the encoder's and the grid's
    (Spec(), Spec(), Spec()),
    (Spec("tp"), Spec(("to", "tp")), Spec(("to", "ti"))),
    (Spec("pp"), Spec(("po", "pp")), Spec(("po", "pi"))),
    (Spec(None, "pp"), Spec(None, ("po", "pp")), Spec(None, ("po", "pi"))),
    (Spec(("dp", "pp", "tp")), Spec(("dp", "po", "pp", "to", "tp")), Spec(FIGURE_5.axes)),
    (Spec("pp", "tp"), Spec(("po", "pp"), "tp"), Spec(("po", "pi"), ("to", "ti"))),
]


@pytest.mark.parametrize("specs", SPECS, ids=str)
def test_an_array_passes_between_meshes_without_moving(specs: tuple[Spec, ...]) -> None:
    meshes = make_meshes(FIGURE_5, jax.devices())
    named = [
        NamedSharding(mesh, spec)
        for mesh, spec in zip(
            (meshes.llm, meshes.encoders["vision"], meshes.mesh), specs, strict=True
        )
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
