"""Which weights are cut over which devices."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

from optimus_jax.parallel.mesh import Grid, make_meshes
from optimus_jax.parallel.sharding import (
    RULES,
    grid_specs,
    is_axes,
    shardings,
    spec,
    storage_sharding,
)
from optimus_jax.parallel.stages import stage_axes, stage_tree
from optimus_jax.schedule.task import Pipeline
from tests.models.small import small_model

MODEL = small_model()
PIPE = Pipeline(2, 2, llm_layers=(1, 1))


@pytest.fixture(scope="module")
def meshes() -> Any:
    return make_meshes(Grid(dp=2, pp=2), jax.devices())


def staged() -> tuple[Any, Any]:
    """Axis names and shapes of the staged weights."""
    shapes = jax.eval_shape(MODEL.init, jax.random.key(0))
    return stage_axes(MODEL.axes()), jax.eval_shape(lambda w: stage_tree(w, PIPE), shapes)


def leaves(tree: Any) -> dict[str, Any]:
    """By the names that lead to it, each leaf."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_axes)
    return {"/".join(step.key for step in path): leaf for path, leaf in flat}


def test_the_llms_layers_alone_are_cut_and_over_its_stages_alone(meshes: Any) -> None:
    axes, shapes = staged()
    found, sizes = leaves(shardings(axes, meshes)), leaves(shapes)
    assert found.keys() == sizes.keys()
    for name, sharding in found.items():
        shape = sizes[name].shape
        if name.startswith("llm/layers/"):
            assert shape[:3] == (1, 2, 1)  # chunks, stages, layers of a stage
            assert sharding.shard_shape(shape) == (1, 1, *shape[2:])
            stage_of = {
                device: index[1].start or 0
                for device, index in sharding.devices_indices_map(shape).items()
            }
            wanted = {d: s for row in meshes.llm.devices for s, [d] in enumerate(row)}
            assert stage_of == wanted  # in every replica
        else:
            assert sharding.is_fully_replicated


def test_each_module_is_on_its_own_mesh(meshes: Any) -> None:
    for name, sharding in leaves(shardings(staged()[0], meshes)).items():
        mesh = meshes.llm if name.startswith("llm/") else meshes.encoder
        assert sharding.mesh == mesh, name
        assert len(sharding.device_set) == 4


def test_the_grids_cuts_are_the_same_cuts(meshes: Any) -> None:
    axes, shapes = staged()
    specs, sizes = leaves(grid_specs(axes)), leaves(shapes)
    for name, sharding in leaves(shardings(axes, meshes)).items():
        on_grid = NamedSharding(meshes.grid, specs[name])
        shape = sizes[name].shape
        assert on_grid.is_equivalent_to(sharding, len(shape)), name
        assert on_grid.devices_indices_map(shape) == sharding.devices_indices_map(shape)


def test_tensor_parallel_dimensions_are_named_though_tp_is_one() -> None:
    assert spec(("layers", "width", None, "heads", None)) == Spec(None, None, None, "tp", None)
    assert spec((None, "stages", "layers", "hidden", "width")) == Spec(None, "pp", None, "tp", None)
    assert spec(("vocabulary", "width")) == Spec("tp", None)
    specs = leaves(grid_specs(staged()[0]))
    assert specs["llm/layers/mlp/up"] == Spec(None, ("po", "pi"), None, None, ("to", "ti"))
    assert specs["encoder/layers/mlp/up"] == Spec(None, None, "ti")
    assert specs["projector/mlp/down"] == Spec("ti", None)


def test_two_cuts_over_one_axis_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'heads', 'hidden'.*same mesh axis.*'tp', 'tp'"):
        spec(("heads", "hidden"))


def test_every_axis_that_the_model_names_has_a_rule() -> None:
    named = {axis for axes in leaves(staged()[0]).values() for axis in axes}
    assert named == set(RULES)


def test_stored_arrays_are_cut_along_the_first_dimension_that_divides(meshes: Any) -> None:
    cases = {
        (8, 4): (2, 4),
        (3, 8): (3, 2),
        (2, 3, 12): (2, 3, 3),
        (3, 5): (3, 5),
        (): (),
        (0, 4): (0, 1),
    }
    for shape, piece in cases.items():
        sharding = storage_sharding(shape, meshes.grid)
        assert sharding.shard_shape(shape) == piece, shape
        assert sharding.device_set == set(meshes.grid.devices.flat)
    pieces = storage_sharding((8, 4), meshes.grid).devices_indices_map((8, 4)).values()
    covered = np.zeros((8, 4), int)
    for piece in pieces:
        covered[piece] += 1
    assert (covered == 1).all()
