"""One device order, two meshes: the LLM's, the encoder's, and their common refinement.

Devices form one grid with axes (dp, po, pi, to, ti). The LLM sees dp, pp = po x pi, tp = to x ti;
the encoder sees pp = pi, tp = ti and the rest as data parallelism: dp x po x to. So encoder sizes
divide the LLM's by construction and each device holds a shard of both. All meshes list the same
devices in the same order, so an array can pass from one to another without moving.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from optimus_jax.errors import UserError

GRID_AXES = ("dp", "po", "pi", "to", "ti")
PIPE = ("po", "pi")  # the LLM's stages, flattened in this order
ENCODER_DATA = ("dp", "po", "to")  # replicas of the encoder


@dataclasses.dataclass(frozen=True)
class Grid:
    """Sizes of the refined grid. pi and ti are 1: every device holds a whole encoder."""

    dp: int
    pp: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.dp, self.pp, 1, 1, 1

    @property
    def size(self) -> int:
        return self.dp * self.pp


@dataclasses.dataclass(frozen=True)
class Meshes:
    """`llm` has axes (dp, pp, tp). `encoder` has the grid's axes under the encoder's names:
    (dp, po, pp, to, tp), of which `encoder_data` together are its data parallelism. `grid` has
    GRID_AXES; the step's shard_map runs over it."""

    llm: Mesh
    encoder: Mesh
    grid: Mesh


def make_meshes(grid: Grid, devices: Sequence[jax.Device]) -> Meshes:
    """Meshes over the first `grid.size` devices that `spread` picks.

    Raises UserError naming both numbers if there are too few devices.
    """
    array = np.array(spread(devices, grid.size)).reshape(grid.shape)
    dp, po, pi, to, ti = grid.shape

    def mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
        # make_mesh and Mesh differ in their default axis types, so they are named
        return Mesh(array.reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))

    return Meshes(
        llm=mesh((dp, po * pi, to * ti), ("dp", "pp", "tp")),
        encoder=mesh(grid.shape, ("dp", "po", "pp", "to", "tp")),
        grid=mesh(grid.shape, GRID_AXES),
    )


def spread(devices: Sequence[jax.Device], count: int) -> list[jax.Device]:
    """`count` devices, the same number from each process where they divide, in process order."""
    if count > len(devices):
        raise UserError(
            f"the plan needs {count} devices, this machine shows {len(devices)}: choose"
            f" parallel.dp x parallel.pp of at most {len(devices)}, or set JAX_PLATFORMS=cpu, where"
            " any number can be made"
        )
    by_process: dict[int, list[jax.Device]] = {}
    for device in devices:
        by_process.setdefault(device.process_index, []).append(device)
    share, rest = divmod(count, len(by_process))
    if rest or any(len(own) < share for own in by_process.values()):
        return list(devices)[:count]
    return [device for own in by_process.values() for device in own[:share]]
