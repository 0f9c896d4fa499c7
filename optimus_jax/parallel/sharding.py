"""Which mesh axis each dimension of each weight is cut over: rules as data."""

from __future__ import annotations

from jax.sharding import Mesh, NamedSharding, PartitionSpec

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
