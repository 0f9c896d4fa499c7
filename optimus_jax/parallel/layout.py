"""How each weight lies on the devices: what cuts it, who has a copy, whose gradients are summed."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from optimus_jax.parallel.mesh import Axes, Grid, Meshes
from optimus_jax.parallel.sharding import is_axes, spec
from optimus_jax.parallel.tensor import is_partial

Tree = Any

# Weights below this many bytes on a device stay whole under ZeRO: to gather so little would cost
# more time than it saves memory.
SHARDED = 1 << 20


@dataclasses.dataclass(frozen=True)
class Layout:
    """One weight in the axes of the grid.

    `cut` has the axes that cut each dimension among stages and tensor shards. `replicas` are the
    axes along which devices hold the same values and add up their gradients. If `zero` is a
    dimension, master weight and optimiser state are cut along it over the replicas as well (ZeRO-1,
    Rajbhandari et al. 2020). `partial` are the tensor axes along which a gradient is a part of the
    sum although the weight is whole.
    """

    module: str
    cut: tuple[Axes, ...]
    replicas: Axes
    partial: Axes
    zero: int | None = None

    def spec(self, master: bool = True) -> PartitionSpec:
        """The cut of the master weight, or of the weight as a step computes with it."""
        return PartitionSpec(*(axes or None for axes in (self.master if master else self.cut)))

    @property
    def master(self) -> tuple[Axes, ...]:
        """The axes that cut each dimension of the master weight."""
        cut = list(self.cut)
        if self.zero is not None:
            cut[self.zero] += self.replicas
        return tuple(cut)


def layouts(
    staged_axes: Tree, shapes: Tree, grid: Grid, sequence: dict[str, bool], least: float
) -> Tree:
    """A Layout for each staged weight, from its logical axes and its shape.

    `sequence` says which modules have sequence parallelism. Weights whose part on one device has
    `least` elements or more are cut over their replicas, where a dimension divides.
    """

    def one(path: tuple[Any, ...], axes: tuple[str | None, ...], shape: Any) -> Layout:
        module = module_of(path)
        tensor, stages, replicas = _axes_of(module, grid)
        names = [{None: (), "pp": stages, "tp": tensor}[name] for name in _padded(spec(axes), axes)]
        names = [tuple(a for a in cut if grid.shape[a] > 1) for cut in names]
        keys = tuple(str(key.key) for key in path)
        everywhere = (*replicas, *stages) if "layers" not in keys else replicas
        held = tuple(a for a in grid.axes if a in everywhere and grid.shape[a] > 1)
        whole = not any(set(cut) & set(tensor) for cut in names)
        local = [n // grid.extent(cut) for n, cut in zip(shape.shape, names, strict=True)]
        zero = None
        if held and math.prod(local) >= least:
            count = grid.extent(held)
            zero = next((k for k, n in enumerate(local) if n % count == 0), None)
        partial = is_partial(keys, cut=not whole, sequence=sequence[module])
        over = tuple(a for a in tensor if grid.shape[a] > 1) if partial else ()
        return Layout(module, tuple(names), held, over, zero)

    return jax.tree_util.tree_map_with_path(one, staged_axes, shapes, is_leaf=is_axes)


def module_of(path: tuple[Any, ...]) -> str:
    """Whose mesh a weight lives on, by its place in the tree: "llm", or the encoder's name. A
    projector is its encoder's."""
    return "llm" if path[0].key == "llm" else str(path[1].key)


def _padded(cut: PartitionSpec, axes: tuple[Any, ...]) -> list[str | None]:
    return [*cut, *[None] * (len(axes) - len(cut))]


def _axes_of(module: str, grid: Grid) -> tuple[Axes, Axes, Axes]:
    """Axes of a module's tensor shards, stages and replicas."""
    if module == "llm":
        return grid.tensor, grid.pipe, ("dp",)
    k = [e.name for e in grid.encoders].index(module)
    return grid.shards_of(k), grid.stages_of(k), grid.replicas_of(k)


def shardings(layouts: Tree, meshes: Meshes) -> Tree:
    """A NamedSharding for each master weight, on its module's own mesh."""

    def one(layout: Layout) -> NamedSharding:
        names = _own_names(layout.module, meshes.grid)

        own = [tuple(dict.fromkeys(names[a] for a in axes)) or None for axes in layout.master]
        return NamedSharding(meshes.of(layout.module), PartitionSpec(*own))

    return jax.tree.map(one, layouts, is_leaf=is_layout)


def _own_names(module: str, grid: Grid) -> dict[str, str]:
    """The axis of a module's own mesh that each axis of the grid is part of."""
    if module == "llm":
        return {"dp": "dp", **dict.fromkeys(grid.pipe, "pp"), **dict.fromkeys(grid.tensor, "tp")}
    tensor, stages, _ = _axes_of(module, grid)
    names = {"dp": "dp", **dict.fromkeys(grid.pipe, "po"), **dict.fromkeys(grid.tensor, "to")}
    return {**names, **dict.fromkeys(stages, "pp"), **dict.fromkeys(tensor, "tp")}


def is_layout(x: object) -> bool:
    """Whether a node of a tree of layouts is a leaf."""
    return isinstance(x, Layout)


def specs(layouts: Tree, master: bool = True) -> Tree:
    """The cuts of all weights over the axes of the grid, for shard_map."""
    return jax.tree.map(lambda layout: layout.spec(master), layouts, is_leaf=is_layout)
