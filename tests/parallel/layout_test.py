"""How the weights lie on the devices: who has which part, and who has the same one."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

from optimus_jax.config import split_layers
from optimus_jax.parallel.layout import (
    Layout,
    is_layout,
    layouts,
    module_of,
    shardings,
    specs,
)
from optimus_jax.parallel.mesh import EncoderGrid, Grid, make_meshes
from optimus_jax.parallel.sharding import cut_axes
from optimus_jax.parallel.stages import stage_axes, stage_tree
from optimus_jax.schedule.task import EncoderPipeline, Pipeline
from tests.models.small import modern_model

MODEL = modern_model()  # pictures in 2 layers, sound in 1, an LLM of 2
NAMES = ["vision", "sound"]
GRID = Grid(2, 2, 2, (EncoderGrid("vision", 2, 1), EncoderGrid("sound", 1, 2)))
SEQUENCE = {"llm": True, "vision": False, "sound": True}
NEVER = float("inf")


@functools.cache
def staged(grid: Grid) -> tuple[Any, Any]:
    """Axis names and shapes of the staged weights."""
    c = MODEL.config
    encoders = tuple(
        EncoderPipeline(split_layers(c.encoders[e.name].layers, e.pp)) for e in grid.encoders
    )
    pipe = Pipeline(grid.pp, 2, 1, split_layers(c.llm.layers, grid.pp), encoders)
    shapes = jax.eval_shape(MODEL.init, jax.random.key(0))
    axes = stage_axes(MODEL.axes(), pipe, NAMES)
    return axes, jax.eval_shape(lambda w: stage_tree(w, pipe, NAMES), shapes)


def found(grid: Grid = GRID, least: float = NEVER, sequence: Any = SEQUENCE) -> Any:
    return layouts(*staged(grid), grid, sequence, least)


def leaves(tree: Any, is_leaf: Any = None) -> dict[str, Any]:
    """By the names that lead to it, each leaf."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    return {"/".join(step.key for step in path): leaf for path, leaf in flat}


def by_name(grid: Grid = GRID, least: float = NEVER, sequence: Any = SEQUENCE) -> dict[str, Layout]:
    return leaves(found(grid, least, sequence), is_layout)


# GRID's axes of more than one device: dp, pi (the LLM's stages and vision's), and the tensor axis
# that the LLM and sound share
(TENSOR,) = (axis for axis in GRID.tensor if GRID.shape[axis] > 1)
(STAGE,) = (axis for axis in GRID.pipe if GRID.shape[axis] > 1)


def test_a_weight_is_cut_over_its_modules_stages_and_shards_and_held_by_the_others() -> None:
    wanted = {
        # LLM: chunks, stages, layers, ...
        "llm/layers/mlp/up": (((), (STAGE,), (), (), (), (TENSOR,)), ("dp",)),
        "llm/layers/attention/kv": (((), (STAGE,), (), (), (), (TENSOR,), ()), ("dp",)),
        "llm/layers/mlp_norm/scale": (((), (STAGE,), (), ()), ("dp",)),
        # on every stage, where only one uses it
        "llm/embed/token": (((TENSOR,), ()), ("dp", STAGE)),
        "llm/head/kernel": (((), (TENSOR,)), ("dp", STAGE)),
        # vision: the same stages, no tensor shards; two lanes on each stage
        "encoders/vision/layers/mlp/up": (((STAGE,), (), (), ()), ("dp", TENSOR)),
        "encoders/vision/embed/kernel": (((), ()), ("dp", TENSOR, STAGE)),
        # sound: whole in each stage, cut over the tensor axis
        "encoders/sound/layers/mlp/up": (((), (), (), (TENSOR,)), ("dp", STAGE)),
        "encoders/sound/projector/mlp/down": (((TENSOR,), ()), ("dp", STAGE)),
    }
    layouts = by_name()
    for name, (cut, held) in wanted.items():
        assert layouts[name].cut == cut, name
        assert set(layouts[name].replicas) == set(held), name
        assert layouts[name].module == module_of(
            [jax.tree_util.DictKey(k) for k in name.split("/")]
        )
        assert layouts[name].zero is None


def test_parts_of_a_gradient_are_summed_over_the_tensor_shards_that_made_them() -> None:
    partial = {name for name, layout in by_name().items() if layout.partial}
    # with sequence parallelism what stands between products sees its own positions
    assert "llm/layers/mlp_norm/scale" in partial and "llm/head/norm/scale" in partial
    assert "encoders/sound/layers/mlp_norm/scale" in partial
    assert "encoders/sound/projector/norm/scale" in partial
    assert not any(name.startswith("encoders/vision") for name in partial)  # tp 1
    assert not any("/embed/" in name for name in partial)
    assert all(layout.partial in ((), (TENSOR,)) for layout in by_name().values())
    for name, layout in by_name().items():
        assert not (layout.partial and TENSOR in sum(layout.cut, ())), name
    whole = by_name(sequence=dict.fromkeys(SEQUENCE, False))
    assert {name for name, layout in whole.items() if layout.partial} == set()
    grid = Grid(1, 1, 2, (EncoderGrid("vision", 1, 2), EncoderGrid("sound", 1, 2)))
    qk = by_name(grid, sequence=dict.fromkeys(SEQUENCE, False))
    assert {name.split("/")[-2] for name, layout in qk.items() if layout.partial} == {"qk_norm"}


@pytest.mark.parametrize("least", [0, 60, 1000])
def test_large_weights_are_cut_over_their_replicas_where_a_dimension_divides(least: int) -> None:
    _, shapes = staged(GRID)
    sizes = leaves(shapes)
    cut = 0
    for name, layout in by_name(least=least).items():
        local = [
            n // GRID.extent(axes) for n, axes in zip(sizes[name].shape, layout.cut, strict=True)
        ]
        count = GRID.extent(layout.replicas)
        divides = [k for k, n in enumerate(local) if n % count == 0]
        if math.prod(local) < least or not divides:
            assert layout.zero is None and layout.master == layout.cut, name
            continue
        cut += 1
        assert layout.zero == divides[0], name
        assert layout.master[layout.zero] == layout.cut[layout.zero] + layout.replicas
        assert layout.spec(master=False) == Spec(*(axes or None for axes in layout.cut))
    assert cut >= 4


GRIDS = [
    GRID,
    Grid(1, 2, 4, (EncoderGrid("vision", 2, 2), EncoderGrid("sound", 1, 4))),
    Grid(4, 1, 2, (EncoderGrid("vision", 1, 1), EncoderGrid("sound", 1, 1))),
]


@pytest.mark.parametrize("least", [0, NEVER], ids=["zero", "whole"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_modules_own_meshes_have_the_grids_cuts(grid: Grid, least: float) -> None:
    meshes = make_meshes(grid, jax.devices())
    made = found(grid, least)
    own, masters = leaves(shardings(made, meshes)), leaves(specs(made))
    _, shapes = staged(grid)
    for name, leaf in leaves(shapes).items():
        module = "llm" if name.startswith("llm/") else name.split("/")[1]
        assert own[name].mesh == meshes.of(module), name
        on_grid = NamedSharding(meshes.mesh, masters[name])
        assert on_grid.devices_indices_map(leaf.shape) == own[name].devices_indices_map(leaf.shape)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_devices_with_the_same_part_are_the_replicas_and_where_it_is_whole_the_shards(
    grid: Grid,
) -> None:
    meshes = make_meshes(grid, jax.devices())
    places = {d: index for index, d in np.ndenumerate(meshes.mesh.devices)}
    _, shapes = staged(grid)
    sizes = leaves(shapes)
    for name, layout in by_name(grid).items():
        where = NamedSharding(meshes.mesh, layout.spec(master=False))
        first, *_ = meshes.mesh.devices.flat
        index = where.devices_indices_map(sizes[name].shape)
        same = [places[d] for d in index if index[d] == index[first]]
        differ = {grid.axes[k] for place in same for k, at in enumerate(place) if at}
        cut = set(cut_axes(layout.spec(master=False)))
        assert differ == {a for a in grid.axes if grid.shape[a] > 1} - cut, name
        assert set(layout.replicas) | set(layout.partial) <= differ, name
