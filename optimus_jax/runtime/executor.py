"""Runs a Program: one shard_map over the grid, all axes manual, one scan over the ticks.

Before the ticks every device gathers the weights that it computes with, after them the gradients
are summed into the shards of their replicas (ZeRO-1); encoder tasks may run beside both. At each
tick a device runs the task that its row names, then one exchange moves data over the links of one
pattern, the same on every device. Tasks may hold collectives over axes inside a stage only, since
only there do all members run the same kind at the same tick; exchanges and reductions over replicas
stand outside the tasks. The tables are inputs: another schedule of the same shape does not
recompile.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

from optimus_jax.config import Config
from optimus_jax.models.mllm import Batch, Mllm
from optimus_jax.models.region import POLICIES, SEQUENTIAL, Region
from optimus_jax.models.weights import Params
from optimus_jax.parallel import layout
from optimus_jax.parallel.mesh import Axes, Grid, Meshes, make_meshes
from optimus_jax.parallel.reduction import gather, reduce_gradients
from optimus_jax.parallel.stages import stage_axes, stage_tree
from optimus_jax.parallel.tensor import TensorRegion
from optimus_jax.runtime import slots as slot_buffers
from optimus_jax.runtime.carry import Carry, staged_gradients
from optimus_jax.runtime.clock import Clock
from optimus_jax.runtime.emulation import Sleeps
from optimus_jax.runtime.encoder_tasks import EncoderTasks
from optimus_jax.runtime.feed import Feed
from optimus_jax.runtime.llm_tasks import LlmTasks
from optimus_jax.runtime.tick import Tick
from optimus_jax.schedule.program import Slots
from optimus_jax.schedule.simulate import Durations
from optimus_jax.schedule.task import Pipeline


@dataclasses.dataclass(frozen=True)
class ModulePlan:
    """How one module computes, beside its place on the grid: see config.ParallelConfig."""

    sequence_parallel: bool = True
    recompute: str = "full"


@dataclasses.dataclass(frozen=True)
class Executor:
    """What the compiled step depends on; `slots` and the number of ticks come from a Program.

    `rows` of one microbatch. `plans` says by module ("llm" and the encoders' names) how it
    computes. Weights of which a device holds `zero` bytes or more are cut over their replicas
    (None: none are). `gradients` is the dtype of the sums over microbatches. With `fuse`, Programs
    may have fused tasks; without `tied`, work beside collectives is not bound to them. With
    `poison`, NaN goes wherever nothing is meant to arrive. Without `reduce`, gradients are left as
    each device has them (to show that the checks notice). With `emulate`, every task is a sleep.
    With a `clock`, every tick notes when its parts begin and end.
    """

    model: Mllm
    pipe: Pipeline
    meshes: Meshes
    slots: Slots
    rows: int
    plans: dict[str, ModulePlan] = dataclasses.field(default_factory=dict)
    zero: float | None = layout.SHARDED
    gradients: str = "float32"
    fuse: bool = False
    tied: bool = True
    poison: bool = False
    reduce: bool = True
    emulate: Durations | None = None
    clock: Clock | None = None

    @classmethod
    def of(
        cls,
        config: Config,
        slots: Slots,
        devices: Sequence[jax.Device],
        pipe: Pipeline | None = None,
        **options: Any,
    ) -> Executor:
        """The executor of a checked configuration on the first of `devices`; of another pipeline
        than the configuration's own, if `pipe` is one."""
        pipe = pipe or config.pipeline
        config = config.on(pipe)
        p, encoders = config.parallel, config.encoder_plans
        plans = {n: ModulePlan(e.sequence_parallel, e.recompute) for n, e in encoders.items()}
        plans["llm"] = ModulePlan(p.sequence_parallel, p.recompute)
        return cls(
            Mllm(config.model),
            pipe,
            make_meshes(Grid.of(config), devices),
            slots,
            config.microbatch_rows,
            plans,
            layout.SHARDED if p.zero else None,
            p.gradients,
            p.fuse,
            **options,
        )

    @property
    def encoders(self) -> tuple[str, ...]:
        """The encoders' names, in the order of the pipeline's and the grid's."""
        return tuple(self.model.config.encoders)

    @functools.cached_property
    def layouts(self) -> Params:
        """How the staged weights lie on the devices."""
        shapes = jax.eval_shape(
            lambda key: stage_tree(self.model.init(key), self.pipe, self.encoders),
            jax.random.key(0),
        )
        axes = stage_axes(self.model.axes(), self.pipe, self.encoders)
        sequence = {name: self.plan(name).sequence_parallel for name in ("llm", *self.encoders)}
        least = float("inf") if self.zero is None else self.zero / 4
        return layout.layouts(axes, shapes, self.meshes.grid, sequence, least)

    @property
    def param_specs(self) -> Params:
        """How the staged master weights are cut over the grid."""
        return layout.specs(self.layouts)

    def plan(self, module: str) -> ModulePlan:
        return self.plans.get(module, ModulePlan())

    @property
    def calls_host(self) -> bool:
        """Whether the step calls into Python as it runs. jax then wants all arrays on one mesh."""
        return self.emulate is not None or self.clock is not None

    def weight_shardings(self) -> Params:
        """Where the staged weights lie: each module's on its own mesh."""
        if self.calls_host:
            return jax.tree.map(
                lambda spec: NamedSharding(self.meshes.mesh, spec), self.param_specs
            )
        return layout.shardings(self.layouts, self.meshes)

    def loss_and_gradients(
        self, masters: Params, batch: Batch, *tables: jax.Array
    ) -> tuple[jax.Array, Params, jax.Array]:
        """Loss and gradients of staged weights, equal to those of Mllm.loss; and [1] the number of
        tasks and exchanges on this device that gave NaN.

        Runs inside shard_map: all arrays are local shards, the gradients those of the whole batch.
        """
        table, pattern, prologue, epilogue = tables
        batch = {name: x[0] for name, x in batch.items()}
        weight = lax.psum(jnp.sum(batch["weights"]), "dp")
        gathered = functools.partial(gather, dtype=self.model.config.dtype)
        with jax.named_scope("gather_encoders"):
            encoders = gathered(masters["encoders"], self.layouts["encoders"])
        own = self._encoder_tasks(encoders, batch)
        c = slot_buffers.make(self, masters)

        def llm(masters: Params, scope: str) -> Params:
            with jax.named_scope("gather_llm"):
                return gathered(masters, self.layouts["llm"], scope=scope)

        tick = functools.partial(self._tick, own)
        weights, c = self._beside(llm, masters["llm"], tick(None), prologue[:, 0], c)
        tasks = self._llm_tasks(weights, batch, 1 / weight, own)
        c, _ = lax.scan(lambda c, x: (tick(tasks).run(c, *x), None), c, (table[:, 0], pattern))
        if not self.reduce:
            _, c = self._beside(None, None, tick(None), epilogue[:, 0], c)
            return self._loss(c), staged_gradients(c.grads), c.nans[None]

        def scatter(grads: Params, scope: str) -> Params:
            with jax.named_scope("scatter_llm"):
                grads = staged_gradients({"llm": grads})["llm"]
                return reduce_gradients(grads, self.layouts["llm"], scope)

        llm_grads, rest = c.grads["llm"], {**c.grads, "llm": {}}
        reduced, c = self._beside(
            scatter, llm_grads, tick(None), epilogue[:, 0], c._replace(grads=rest)
        )
        with jax.named_scope("scatter_encoders"):
            grads = staged_gradients({"encoders": c.grads["encoders"]})["encoders"]
            grads = reduce_gradients(grads, self.layouts["encoders"])
        return self._loss(c), {"llm": reduced, "encoders": grads}, c.nans[None]

    def _beside(
        self,
        collective: Callable[[Any, str], Any] | None,
        x: Any,
        tick: Tick,
        rows: jax.Array,
        c: Carry,
    ) -> tuple[Any, Carry]:
        """A collective's result, and the carry after the encoder tasks of `rows`, which run beside
        it: barriers on both sides tie the two together. The collective takes a scope's name."""
        if not len(rows):
            return (collective(x, "alone") if collective else x), c
        tied = self.tied and collective is not None
        if tied:
            x, c = lax.optimization_barrier((x, c))
        y = collective(x, "paired" if tied else "unpaired") if collective else x
        c, _ = lax.scan(lambda c, row: (tick.tasks_only(c, row), None), c, rows)
        return lax.optimization_barrier((y, c)) if tied else (y, c)

    # What the step is made of.

    def region(self, module: str) -> Region:
        """Where a module's layers meet the other tensor shards."""
        grid = self.meshes.grid
        axes = grid.tensor if module == "llm" else grid.shards_of(self.encoders.index(module))
        axes = tuple(a for a in axes if grid.shape[a] > 1)
        size = grid.extent(axes)
        if size == 1:
            return SEQUENTIAL
        return TensorRegion(axes, size, self.plan(module).sequence_parallel)

    def lanes(self, encoder: int) -> tuple[Axes, int]:
        """The axes along which the tensor shards of a stage share an encoder unit's pictures, and
        how many they are."""
        grid = self.meshes.grid
        axes = tuple(a for a in grid.lanes_of(encoder) if grid.shape[a] > 1)
        return axes, grid.extent(axes)

    def _encoder_tasks(self, params: Params, batch: Batch) -> tuple[EncoderTasks, ...]:
        found = []
        for k, (name, sizes) in enumerate(zip(self.encoders, self.pipe.encoders, strict=True)):
            axes, lanes = self.lanes(k)
            x = batch[self.model.config.encoders[name].input]
            part = params[name]
            found.append(
                EncoderTasks(
                    self.model,
                    k,
                    name,
                    {**part, "layers": jax.tree.map(lambda w: w[0], part["layers"])},
                    x.reshape(x.shape[0], sizes.units, lanes, -1, *x.shape[2:]),
                    lax.axis_index(axes) if axes else 0,
                    self.region(name),
                    POLICIES[self.plan(name).recompute],
                )
            )
        return tuple(found)

    def _llm_tasks(
        self, params: Params, batch: Batch, scale: jax.Array, encoders: tuple[EncoderTasks, ...]
    ) -> LlmTasks:
        return LlmTasks(
            self.model,
            {**params, "layers": jax.tree.map(lambda w: w[:, 0], params["layers"])},
            batch,
            scale,
            self.region("llm"),
            POLICIES[self.plan("llm").recompute],
            encoders,
            self.pipe.encoders,
            tuple(self.lanes(k) for k in range(len(encoders))),
            self.fuse,
            self.tied,
        )

    def _tick(self, encoders: tuple[EncoderTasks, ...], llm: LlmTasks | None) -> Tick:
        grid = self.meshes.grid
        own: Any = encoders
        if self.emulate is not None:
            one: Any = Sleeps(self.emulate, self.pipe, grid.pipe)
            own, llm = (one,) * len(encoders), llm and one
        return Tick(llm, own, self.pipe, grid.pipe, self.poison, self.clock)

    def _loss(self, c: Carry) -> jax.Array:
        """The loss of the whole batch; only the last stage has some."""
        return lax.psum(c.loss, ("dp", *self.meshes.grid.pipe))

    def gradient_step(self, compiler_options: dict[str, Any] | None = None) -> Any:
        """jit of (params, batch, *tables) -> (loss, gradients, NaN count of each device)."""
        out = self.param_specs if self.reduce else layout.specs(self.layouts, master=False)
        mapped = jax.shard_map(
            self.loss_and_gradients,
            mesh=self.meshes.mesh,
            in_specs=(self.param_specs, self.feed.batch_specs, *self.feed.table_specs),
            out_specs=(Spec(), out, Spec(self.meshes.grid.axes)),
            check_vma=False,
        )
        return jax.jit(mapped, compiler_options=compiler_options)

    @property
    def feed(self) -> Feed:
        """How batches and tables come to the step."""
        mesh = self.meshes.mesh if self.calls_host else self.meshes.llm
        return Feed(self.model.config, self.meshes, mesh, self.pipe.microbatches, self.rows)
