"""Runs a Program: one shard_map over the grid, all axes manual, one scan over the ticks.

At each tick a device runs the task that its row names, then one exchange moves data over the links
of one pattern, the same on every device. Tasks may hold collectives over axes inside a stage only,
since only there do all members run the same kind at the same tick; exchanges and reductions over
replicas stand outside the tasks. The tables are inputs: another schedule of the same shape does not
recompile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

from optimus_jax.models.mllm import Batch, Mllm
from optimus_jax.models.weights import Params
from optimus_jax.parallel import sharding
from optimus_jax.parallel.mesh import GRID_AXES, PIPE, Meshes
from optimus_jax.parallel.reduction import reduce_gradients
from optimus_jax.parallel.stages import stage_axes
from optimus_jax.runtime import buffers
from optimus_jax.runtime.carry import Carry, Row
from optimus_jax.runtime.clock import Clock
from optimus_jax.runtime.emulation import Sleeps
from optimus_jax.runtime.tasks import Tasks
from optimus_jax.schedule.program import KINDS, Columns, Program, Slots, alphabet
from optimus_jax.schedule.simulate import Durations
from optimus_jax.schedule.task import Kind, Pipeline

Task = Callable[[Carry, Row], Carry]

BATCH_SPECS = {name: Spec("dp") for name in ("image", "tokens", "targets", "weights")}
TABLE_SPECS = Spec(None, PIPE), Spec()


@dataclasses.dataclass(frozen=True)
class Executor:
    """What the compiled step depends on; `slots` and the number of ticks come from a Program.

    `rows` of one microbatch. With `poison`, NaN goes wherever nothing is meant to arrive. Without
    `reduce`, gradients are left as each device has them (to show that the checks notice). With
    `emulate`, every task is a sleep. With a `clock`, every tick notes when its parts begin and end.
    """

    model: Mllm
    pipe: Pipeline
    meshes: Meshes
    slots: Slots
    rows: int
    poison: bool = False
    reduce: bool = True
    emulate: Durations | None = None
    clock: Clock | None = None

    @property
    def axes(self) -> Params:
        """Logical axes of the staged weights."""
        return stage_axes(self.model.axes())

    @property
    def param_specs(self) -> Params:
        """How the staged weights are cut over the grid."""
        return sharding.grid_specs(self.axes)

    @property
    def calls_host(self) -> bool:
        """Whether the step calls into Python as it runs. jax then wants all arrays on one mesh."""
        return self.emulate is not None or self.clock is not None

    def weight_shardings(self) -> Params:
        """Where the staged weights lie: each module's on its own mesh."""
        if self.calls_host:
            return jax.tree.map(
                lambda spec: NamedSharding(self.meshes.grid, spec), self.param_specs
            )
        return sharding.shardings(self.axes, self.meshes)

    def gradients(
        self, params: Params, batch: Batch, table: jax.Array, pattern: jax.Array
    ) -> tuple[jax.Array, Params, jax.Array]:
        """Loss and float32 gradients of staged weights, equal to those of Mllm.loss; and [1] the
        number of tasks and exchanges on this device that gave NaN.

        Runs inside shard_map: all arrays are local shards, the gradients those of the whole batch.
        """
        params = self._own_stage(params)
        batch = {name: x[0] for name, x in batch.items()}
        weight = lax.psum(jnp.sum(batch["weights"]), "dp")
        tasks: Tasks | Sleeps = Tasks(self.model, self.model.cast(params), batch, 1 / weight)
        if self.emulate is not None:
            tasks = Sleeps(self.emulate, self.pipe)
        carry, _ = lax.scan(
            lambda c, tick: (self._tick(tasks, c, *tick), None),
            self._carry(params),
            (table[:, 0], pattern),
        )
        return *self._reduce(carry), carry.nans[None]

    def _carry(self, params: Params) -> Carry:
        c, s, pipe = self.model.config, self.slots, self.pipe
        unit_rows, dtype = self.rows // pipe.units, c.dtype
        llm = self.rows, c.sequence, c.llm.width
        return Carry(
            wire=buffers.make(s.wire, llm, dtype),
            feature=buffers.make(s.feature, (unit_rows, c.image_tokens, c.llm.width), dtype),
            saved=buffers.make(s.saved, (max(pipe.llm_layers) + 1, *llm), dtype),
            encoder=buffers.make(
                s.encoder,
                (pipe.encoder_layers + 1, unit_rows, c.image_tokens, c.encoder.width),
                dtype,
            ),
            grads=jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), params),
            loss=jnp.zeros((), jnp.float32),
            nans=jnp.zeros((), jnp.int32),
        )

    def carry_shapes(self, params: Params) -> list[tuple[int, ...]]:
        """Shapes of one device's slots and gradient sums, for staged weights `params`."""

        def local(x: jax.Array, spec: Spec) -> jax.ShapeDtypeStruct:
            where = NamedSharding(self.meshes.grid, spec)
            return jax.ShapeDtypeStruct(where.shard_shape(x.shape), x.dtype)

        shards = jax.tree.map(local, params, self.param_specs)
        carry = jax.eval_shape(lambda p: self._carry(self._own_stage(p)), shards)
        return [x.shape for x in jax.tree.leaves(carry) if x.ndim]

    @staticmethod
    def _own_stage(params: Params) -> Params:
        """The shards without the dimension of stages, of which a device has one."""
        layers = jax.tree.map(lambda w: w[:, 0], params["llm"]["layers"])
        return {**params, "llm": {**params["llm"], "layers": layers}}

    def _tick(self, tasks: Tasks | Sleeps, c: Carry, row: jax.Array, pattern: jax.Array) -> Carry:
        named = Row(row, Columns(self.pipe.units))
        c = self._note(c)
        # readers of a buffer before its writers: F and EB read features, B and EF write them
        for kind, task in (
            (Kind.F, tasks.forward),
            (Kind.EB, tasks.encoder_backward),
            (Kind.B, tasks.backward),
            (Kind.EF, tasks.encoder_forward),
        ):

            def run(zero: jax.Array, c: Carry, task: Task = task) -> Carry:
                return task(c, named.at(zero))

            c = buffers.when(named.kind == KINDS[kind], run, c)
        return self._note(self._exchange(self._note(c), named, pattern))

    def _note(self, c: Carry) -> Carry:
        return c if self.clock is None else self.clock.note(c)

    def _exchange(self, c: Carry, row: Row, pattern: jax.Array) -> Carry:
        """Only the payload of one class passes through the switch over patterns."""
        patterns = alphabet(self.pipe)
        count = sum(not p.features for p in patterns)  # feature patterns stand last

        def move(features: bool, payload: jax.Array) -> jax.Array:
            kept = [p for p in patterns if p.features == features and p.links]
            first = count if features else 1
            branches = [
                lambda x, links=p.links: lax.ppermute(
                    x, PIPE, [pair for a, b in sorted(links) for pair in ((a, b), (b, a))]
                )
                for p in kept
            ]
            return lax.switch(pattern - first, branches, payload)

        def arrive(buffer: jax.Array, value: jax.Array, slot: jax.Array) -> jax.Array:
            if self.poison:
                value = jnp.where(slot < 0, jnp.nan, value)
            return buffers.put(buffer, value, slot)

        def llm(_: jax.Array, c: Carry) -> Carry:
            value = move(False, buffers.get(c.wire, row.send))
            c = c._replace(wire=arrive(c.wire, value, row.receive))
            return c.after(jnp.where(row.receive < 0, 0, value))  # nothing came, or trash

        def feature(_: jax.Array, c: Carry) -> Carry:
            sent = [buffers.get(c.feature, slot) for slot in row.feature_send]
            values, buffer = move(True, jnp.stack(sent)), c.feature
            for k, slot in enumerate(row.feature_receive):
                buffer = arrive(buffer, values[k], slot)
            return c._replace(feature=buffer).after(
                jnp.where(row.feature_receive[0] < 0, 0, values[0])
            )

        if count > 1:
            c = buffers.when((pattern > 0) & (pattern < count), llm, c)
        if len(patterns) > count:
            c = buffers.when(pattern >= count, feature, c)
        return c

    def _reduce(self, c: Carry) -> tuple[jax.Array, Params]:
        """Loss and gradients of the whole batch, with the dimension of stages again."""
        loss, grads = lax.psum(c.loss, ("dp", *PIPE)), c.grads
        if self.reduce:
            grads = reduce_gradients(grads)
        layers = jax.tree.map(lambda g: g[:, None], grads["llm"]["layers"])
        return loss, {**grads, "llm": {**grads["llm"], "layers": layers}}

    def gradient_step(self, compiler_options: dict[str, Any] | None = None) -> Any:
        """jit of (params, batch, table, pattern) -> (loss, gradients, NaN count of each device)."""
        mapped = jax.shard_map(
            self.gradients,
            mesh=self.meshes.grid,
            in_specs=(self.param_specs, BATCH_SPECS, *TABLE_SPECS),
            out_specs=(Spec(), self.param_specs, Spec(GRID_AXES)),
            check_vma=False,
        )
        return jax.jit(mapped, compiler_options=compiler_options)

    def place_tables(self, program: Program) -> tuple[jax.Array, jax.Array]:
        """The program's tables on the devices."""
        return tuple(
            put_global(x, NamedSharding(self.meshes.grid, spec))
            for x, spec in zip((program.table, program.pattern), TABLE_SPECS, strict=True)
        )  # type: ignore[return-value]

    def place_batch(self, batch: dict[str, np.ndarray]) -> Batch:
        """A global batch [rows of all replicas, ...] on the devices, cut as `batch_shape` says."""
        mesh = self.meshes.grid if self.calls_host else self.meshes.llm
        return {
            name: put_global(self.batch_shape(name, x), NamedSharding(mesh, Spec("dp")))
            for name, x in batch.items()
        }

    def batch_shape(self, name: str, x: np.ndarray) -> np.ndarray:
        """[B, ...] as [dp, M, rows, ...], images as [dp, M, units, unit rows, ...]."""
        dp = self.meshes.grid.shape["dp"]
        cut = (self.pipe.units, self.rows // self.pipe.units) if name == "image" else (self.rows,)
        return x.reshape(dp, self.pipe.microbatches, *cut, *x.shape[1:])


def put_global(x: np.ndarray, where: NamedSharding) -> jax.Array:
    """A host array, the same in every process, as one global array."""
    return jax.make_array_from_callback(x.shape, where, lambda index: x[index])
