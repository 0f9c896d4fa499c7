"""Which mesh axis each dimension of each weight is cut over: rules as data."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from optimus_jax.parallel.mesh import PIPE, Meshes

Tree = Any

# Logical axis (models/) to axis of the module's own mesh. 'stages' exists in staged stacks only.
RULES: dict[str | None, str | None] = {
    "stages": "pp",
    "layers": None,
    "heads": "tp",
    "hidden": "tp",
    "vocabulary": "tp",
    "width": None,
    None: None,
}

# The axes of a module's mesh, as axes of the grid.
ON_GRID: dict[str, dict[str, str | tuple[str, ...]]] = {
    "llm": {"dp": "dp", "pp": PIPE, "tp": ("to", "ti")},
    "encoder": {"pp": "pi", "tp": "ti"},
}


def is_axes(x: object) -> bool:
    """Whether a node of a tree of axis names is a leaf."""
    return isinstance(x, tuple)


def spec(axes: tuple[str | None, ...]) -> PartitionSpec:
    """Raises ValueError if two dimensions would be cut over the same mesh axis."""
    names = [RULES[axis] for axis in axes]
    used = [name for name in names if name]
    if len(set(used)) < len(used):
        raise ValueError(f"dimensions {axes} would be cut over the same mesh axis: {names}")
    return PartitionSpec(*names)


def module_of(path: tuple[Any, ...]) -> str:
    """The mesh that a weight lives on, by its place in the tree: the projector is the encoder's."""
    return "llm" if path[0].key == "llm" else "encoder"


def shardings(staged_axes: Tree, meshes: Meshes) -> Tree:
    """A NamedSharding for each weight, on its module's own mesh, from its tree of axis names."""

    def one(path: tuple[Any, ...], axes: tuple[str | None, ...]) -> NamedSharding:
        return NamedSharding(getattr(meshes, module_of(path)), spec(axes))

    return jax.tree_util.tree_map_with_path(one, staged_axes, is_leaf=is_axes)


def grid_specs(staged_axes: Tree) -> Tree:
    """The same cuts over the axes of the grid, for shard_map."""

    def one(path: tuple[Any, ...], axes: tuple[str | None, ...]) -> PartitionSpec:
        names = ON_GRID[module_of(path)]
        return PartitionSpec(*(None if name is None else names[name] for name in spec(axes)))

    return jax.tree_util.tree_map_with_path(one, staged_axes, is_leaf=is_axes)


def cut_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """The axes of the grid that an array is cut over, in one flat tuple."""
    flat: list[str] = []
    for entry in spec:
        flat += entry if isinstance(entry, tuple) else [entry] if entry else []
    return tuple(flat)


def storage_sharding(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """How a stage-free array lies on the devices while it is saved or restored: cut along its first
    dimension that divides among all of them, so that no device holds a whole large array."""
    for k, size in enumerate(shape):
        if size % mesh.size == 0 and size:
            return NamedSharding(mesh, PartitionSpec(*[None] * k, mesh.axis_names))
    return NamedSharding(mesh, PartitionSpec())
