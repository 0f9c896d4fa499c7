"""One device order, several meshes: the LLM's, one for each encoder, and their common refinement.

Devices form one grid with axes (dp, po, pi, to, ti). The LLM sees dp, pp = po x pi, tp = to x ti;
an encoder sees pp = pi, tp = ti and the rest as data parallelism: dp x po x to. So encoder sizes
divide the LLM's by construction and each device holds a shard of both. Encoders of several sizes
cut the grid more finely: each has the innermost pipe axes and the innermost tensor axes. All meshes
list the same devices in the same order, so an array can pass from one to another without moving.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from optimus_jax.config import FIRST, Config
from optimus_jax.errors import UserError

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class EncoderGrid:
    """An encoder's name and the sizes of its own parallel plan."""

    name: str = FIRST
    pp: int = 1
    tp: int = 1


@dataclasses.dataclass(frozen=True)
class Grid:
    """Sizes of the refined grid: replicas, stages and tensor shards of the LLM, and the encoders'.

    Raises ValueError if the encoders' sizes do not divide one another and the LLM's, in which case
    no grid refines them all.
    """

    dp: int
    pp: int
    tp: int = 1
    encoders: tuple[EncoderGrid, ...] = (EncoderGrid(),)

    def __post_init__(self) -> None:
        _ = self.shape

    @classmethod
    def of(cls, config: Config) -> Grid:
        """The grid of a checked configuration."""
        p = config.parallel
        plans = config.encoder_plans.items()
        encoders = tuple(EncoderGrid(name, e.pp, e.tp) for name, e in plans)
        return cls(p.dp, p.pp, p.tp, encoders)

    @functools.cached_property
    def shape(self) -> dict[str, int]:
        """Sizes of all axes, by name, outermost first."""
        pipe = _refined(self.pp, [e.pp for e in self.encoders])
        tensor = _refined(self.tp, [e.tp for e in self.encoders])
        return {"dp": self.dp, **_named("p", pipe), **_named("t", tensor)}

    @property
    def size(self) -> int:
        return self.dp * self.pp * self.tp

    @property
    def axes(self) -> Axes:
        return tuple(self.shape)

    @property
    def pipe(self) -> Axes:
        """The LLM's stages, flattened in this order."""
        return tuple(name for name in self.shape if name[0] == "p")

    @property
    def tensor(self) -> Axes:
        """The LLM's tensor shards, flattened in this order."""
        return tuple(name for name in self.shape if name[0] == "t")

    def stages_of(self, encoder: int) -> Axes:
        """Axes of an encoder's stages."""
        return self._inner(self.pipe, self.encoders[encoder].pp)

    def shards_of(self, encoder: int) -> Axes:
        """Axes of an encoder's tensor shards."""
        return self._inner(self.tensor, self.encoders[encoder].tp)

    def lanes_of(self, encoder: int) -> Axes:
        """Tensor axes along which an encoder has replicas: they share the pictures of a unit."""
        return tuple(a for a in self.tensor if a not in self.shards_of(encoder))

    def replicas_of(self, encoder: int) -> Axes:
        """Axes of an encoder's replicas."""
        own = {*self.stages_of(encoder), *self.shards_of(encoder)}
        return tuple(a for a in self.axes if a not in own)

    def extent(self, axes: Axes) -> int:
        """Devices along some axes."""
        return math.prod(self.shape[a] for a in axes)

    def _inner(self, axes: Axes, size: int) -> Axes:
        """The innermost of `axes` that together have `size` devices: at least the last one."""
        for k in reversed(range(len(axes))):
            if self.extent(axes[k:]) == size:
                return axes[k:]
        raise AssertionError(f"{size} is not a product of the innermost of {axes}")


def _refined(whole: int, parts: Sequence[int]) -> list[int]:
    """Sizes, outermost first, such that `whole` is their product and each of `parts` a product of
    the innermost of them."""
    sizes, below = [], 1
    for part in sorted(set(parts)):
        if part % below:
            raise ValueError(f"{part} is no multiple of {below}: no grid has both")
        sizes.append(part // below)
        below = part
    if whole % below:
        raise ValueError(f"{whole} is no multiple of {below}: no grid has both")
    return [whole // below, *reversed(sizes)]


def _named(letter: str, sizes: list[int]) -> dict[str, int]:
    names = [f"{letter}o", *(f"{letter}{k}" for k in range(1, len(sizes) - 1)), f"{letter}i"]
    return dict(zip(names, sizes, strict=True))


@dataclasses.dataclass(frozen=True)
class Meshes:
    """`llm` has axes (dp, pp, tp). Each of `encoders` has axes (dp, po, pp, to, tp), of which dp,
    po and to together are its data parallelism. `mesh` has the axes of `grid`; the step's shard_map
    runs over it."""

    grid: Grid
    mesh: Mesh
    llm: Mesh
    encoders: dict[str, Mesh]

    def of(self, module: str) -> Mesh:
        """The mesh of the LLM ("llm") or of an encoder."""
        return self.llm if module == "llm" else self.encoders[module]


def make_meshes(grid: Grid, devices: Sequence[jax.Device]) -> Meshes:
    """Meshes over the first `grid.size` devices that `spread` picks.

    Raises UserError naming both numbers if there are too few devices.
    """
    array = np.array(spread(devices, grid.size))

    def mesh(**shape: int) -> Mesh:
        # make_mesh and Mesh differ in their default axis types, so they are named
        names = tuple(shape)
        auto = (AxisType.Auto,) * len(names)
        return Mesh(array.reshape(tuple(shape.values())), names, axis_types=auto)

    return Meshes(
        grid=grid,
        mesh=mesh(**grid.shape),
        llm=mesh(dp=grid.dp, pp=grid.pp, tp=grid.tp),
        encoders={
            e.name: mesh(dp=grid.dp, po=grid.pp // e.pp, pp=e.pp, to=grid.tp // e.tp, tp=e.tp)
            for e in grid.encoders
        },
    )


def spread(devices: Sequence[jax.Device], count: int) -> list[jax.Device]:
    """`count` devices, the same number from each process where they divide, in process order."""
    if count > len(devices):
        raise UserError(
            f"the plan needs {count} devices, this machine shows {len(devices)}: choose"
            f" parallel.dp x pp x tp of at most {len(devices)}, or set JAX_PLATFORMS=cpu, where"
            " any number can be made"
        )
    by_process: dict[int, list[jax.Device]] = {}
    for device in devices:
        by_process.setdefault(device.process_index, []).append(device)
    share, rest = divmod(count, len(by_process))
    if rest or any(len(own) < share for own in by_process.values()):
        return list(devices)[:count]
    return [device for own in by_process.values() for device in own[:share]]
