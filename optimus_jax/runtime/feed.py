"""What a compiled step is fed with beside its state: batch and tables, on the devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from optimus_jax.config import ModelConfig
from optimus_jax.models.mllm import Batch
from optimus_jax.parallel.mesh import Meshes
from optimus_jax.schedule.program import Program

Tables = tuple[jax.Array, ...]
Place = Callable[[Any, NamedSharding], Any]


def put_global(x: np.ndarray, where: NamedSharding) -> jax.Array:
    """A host array, the same in every process, as one global array."""
    return jax.make_array_from_callback(x.shape, where, lambda index: x[index])


def put_shape(x: Any, where: NamedSharding) -> jax.ShapeDtypeStruct:
    """The shape of such an array, where nothing is to be on any device."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)


@dataclasses.dataclass(frozen=True)
class Feed:
    """How batches and tables are cut. The batch lies on `batch_mesh`. A replica's batch is cut into
    `microbatches` of `rows`."""

    model: ModelConfig
    meshes: Meshes
    batch_mesh: Mesh
    microbatches: int
    rows: int

    @property
    def table_specs(self) -> tuple[Spec, ...]:
        """Of the table, the patterns, the prologue and the epilogue."""
        rows = Spec(None, self.meshes.grid.pipe)
        return rows, Spec(), rows, rows

    @property
    def batch_specs(self) -> dict[str, Spec]:
        inputs = {e.input for e in self.model.encoders.values()}
        return dict.fromkeys(("tokens", "targets", "weights", *sorted(inputs)), Spec("dp"))

    def tables(self, program: Program, place: Place = put_global) -> Tables:
        """The program's tables on the devices."""
        tables = program.table, program.pattern, program.prologue, program.epilogue
        return tuple(
            place(x, NamedSharding(self.meshes.mesh, spec))
            for x, spec in zip(tables, self.table_specs, strict=True)
        )

    def batch(self, batch: dict[str, np.ndarray], place: Place = put_global) -> Batch:
        """A global batch [rows of all replicas, ...] as [dp, M, rows, ...] on the devices."""
        cut = self.meshes.grid.dp, self.microbatches, self.rows
        return {
            name: place(
                batch[name].reshape(*cut, *batch[name].shape[1:]),
                NamedSharding(self.batch_mesh, spec),
            )
            for name, spec in self.batch_specs.items()
        }
