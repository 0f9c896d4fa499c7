"""Runs Programs and measures how far loss and gradients are from the sequential model's."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from optimus_jax.data.noise import random_batch
from optimus_jax.models.mllm import Mllm
from optimus_jax.models.weights import Params
from optimus_jax.parallel.mesh import EncoderGrid, Grid, make_meshes
from optimus_jax.parallel.stages import stage_tree
from optimus_jax.runtime.compilation import quick_compile
from optimus_jax.runtime.executor import Executor, ModulePlan
from optimus_jax.runtime.feed import put_global
from optimus_jax.runtime.small_plan import SmallPlan
from optimus_jax.schedule.lower import lower
from optimus_jax.schedule.methods import schedule as make_schedule
from optimus_jax.schedule.program import Program, fit_together
from optimus_jax.schedule.task import Schedule
from optimus_jax.schedule.validate import validate

Errors = tuple[float, float]  # relative, of the loss and of the worst gradient


def random_params(model: Mllm, seed: int = 1) -> Params:
    """Weights without zeros, which would hide mistakes; made by numpy, since compiling the
    initialisation takes longer than all else."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(model.init, jax.random.key(0))

    def one(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        middle = 1.0 if path[-1].key.endswith("scale") else 0.0
        return (middle + 0.15 * rng.standard_normal(leaf.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(one, shapes)


def grid_of(plan: SmallPlan) -> Grid:
    """The grid of a plan."""
    towers = zip(plan.names, plan.towers, strict=True)
    encoders = tuple(EncoderGrid(name, t.pp, t.tp) for name, t in towers)
    return Grid(plan.dp, plan.pp, plan.tp, encoders)


def module_plans(plan: SmallPlan) -> dict[str, ModulePlan]:
    """How each module of a plan computes."""
    towers = zip(plan.names, plan.towers, strict=True)
    plans = {name: ModulePlan(plan.sequence, t.recompute) for name, t in towers}
    return {"llm": ModulePlan(plan.sequence, plan.recompute), **plans}


class Bench:
    """A plan's executor, its batch, and the loss and gradients that it must have.

    With `quick`, everything is compiled for little compile time rather than for speed.
    """

    def __init__(self, plan: SmallPlan, quick: bool = True):
        self.options = quick_compile() if quick else {}
        self.plan, self.pipe, self.model = plan, plan.pipeline, Mllm(plan.sizes)
        self.batch = random_batch(self.model.config, plan.dp * plan.microbatches * plan.rows)
        self.params = random_params(self.model)
        self.meshes = make_meshes(grid_of(plan), jax.devices())
        value_and_grad = jax.jit(jax.value_and_grad(self.model.loss), compiler_options=self.options)
        self.expected = {
            images: jax.tree.map(np.asarray, value_and_grad(self.params, self.batch, images))
            for images in (False, True)
        }

    def here(self) -> bool:
        """Whether this process has devices of the mesh."""
        return any(d.process_index == jax.process_index() for d in self.meshes.mesh.devices.flat)

    def executor(self, program: Program, **options: Any) -> Executor:
        plan = self.plan
        fixed = {"plans": module_plans(plan), "zero": 0 if plan.zero else None, "fuse": plan.fuse}
        return Executor(
            self.model,
            self.pipe,
            self.meshes,
            program.slots,
            plan.rows,
            **{**fixed, "poison": True, **options},
        )

    def staged(self, executor: Executor, tree: Any) -> Any:
        """A stage-free tree of weights as the executor wants it, on the devices."""
        host = jax.tree.map(np.asarray, stage_tree(tree, self.pipe, executor.encoders))
        return jax.tree.map(put_global, host, executor.weight_shardings())

    def errors(self, loss: jax.Array, grads: Any, images: bool) -> Errors:
        """Of the loss, and the worst of all weights: |g - g_ref| / max(|g_ref|, 1e-4 |all
        gradients|), on every set of devices that together hold a copy; infinite where a value is
        not finite. Of what this process holds."""
        return self.judge(*self.squares(loss, grads, images), images)

    def squares(self, loss: jax.Array, grads: Any, images: bool) -> tuple[float, np.ndarray]:
        """The relative error of the loss, and [copies, weights] squares of the gradients' errors,
        summed over this process's devices."""
        wanted_loss, wanted = self.expected[images]
        wanted = jax.tree.map(np.asarray, stage_tree(wanted, self.pipe, tuple(self.plan.names)))
        sums = self.no_squares()
        pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(wanted), strict=True)
        for k, (g, ref) in enumerate(pairs):
            for shard in g.addressable_shards:
                difference = np.asarray(shard.data, np.float64) - ref[shard.index]
                sums[shard.replica_id, k] += np.sum(difference**2)
        losses = [np.asarray(shard.data) for shard in loss.addressable_shards]
        return max(_finite(abs(x - wanted_loss) / wanted_loss) for x in losses), sums

    def no_squares(self) -> np.ndarray:
        """What a process without devices of the mesh has."""
        return np.zeros((self.meshes.mesh.size, len(jax.tree.leaves(self.params))))

    def judge(self, loss: float, squares: np.ndarray, images: bool) -> Errors:
        """The errors of a run from what all its processes found."""
        _, wanted = self.expected[images]
        norms = np.array([np.linalg.norm(g) for g in jax.tree.leaves(wanted)])
        sizes = np.maximum(norms, 1e-4 * np.linalg.norm(norms))
        return loss, max(map(_finite, (np.sqrt(squares) / sizes).ravel()))


def _finite(x: Any) -> float:
    return float(x) if np.isfinite(x) else float("inf")


def compare(
    plan: SmallPlan, cases: list[tuple[str, str]], inject: str = "", quick: bool = True
) -> list[Errors]:
    """The errors of each (order, method), all through one compilation; every process of the run
    calls it alike. `inject` is one of verified.INJECTIONS."""
    bench = Bench(plan, quick)
    found = (
        _run(bench, cases, inject) if bench.here() else [(0.0, bench.no_squares()) for _ in cases]
    )
    losses, squares = (np.array(x, np.float64) for x in zip(*found, strict=True))
    if jax.process_count() > 1:
        # as bytes: x64 is off, and float32 would round
        every = [
            multihost_utils.process_allgather(np.frombuffer(x.tobytes(), np.uint8))
            for x in (losses, squares)
        ]
        losses, squares = (
            np.array([np.frombuffer(one.tobytes()).reshape(x.shape) for one in all_])
            for x, all_ in zip((losses, squares), every, strict=True)
        )
        losses, squares = losses.max(axis=0), squares.sum(axis=0)
    return [
        bench.judge(float(loss), own, images=method != "text_only")
        for loss, own, (_, method) in zip(losses, squares, cases, strict=True)
    ]


def _run(bench: Bench, cases: list[tuple[str, str]], inject: str) -> list[tuple[float, np.ndarray]]:
    """What this process sees of each case: see Bench.squares."""
    pipe, durations = bench.pipe, bench.plan.durations
    programs = []
    for order, method in cases:
        schedule = make_schedule(method, order, pipe, durations)
        if inject == "drop_microbatch":
            schedule = _without_microbatch(schedule, 0)
        program = lower(schedule, durations)
        if not inject:
            validate(program, schedule)
        programs.append(_swapped_slots(program) if inject == "swap_slots" else program)
    programs = fit_together(programs)
    executor = bench.executor(programs[0], reduce=inject != "skip_reduce")
    step, params = executor.gradient_step(bench.options), bench.staged(executor, bench.params)
    batch = executor.feed.batch(bench.batch)
    found = []
    for (_, method), program in zip(cases, programs, strict=True):
        loss, grads, _ = step(params, batch, *executor.feed.tables(program))
        found.append(bench.squares(loss, grads, images=method != "text_only"))
    if step._cache_size() != 1:
        raise AssertionError(f"{len(cases)} schedules took {step._cache_size()} compilations")
    return found


def _without_microbatch(schedule: Schedule, microbatch: int) -> Schedule:
    orders = tuple(
        tuple(task for task in order if task.microbatch != microbatch) for order in schedule.orders
    )
    return Schedule(schedule.pipeline, orders)


def _swapped_slots(program: Program) -> Program:
    """The saved inputs of two microbatches mixed up: two B of one device read each other's slot."""
    table, column = program.table.copy(), program.columns["saved"]
    for device in range(program.pipeline.stages):
        ticks = [
            t
            for t in range(program.ticks)
            if (task := program.task(t, device)) is not None and task.kind == "B"
        ]
        for a, b in itertools.pairwise(ticks):
            if table[a, device, column] != table[b, device, column]:
                slots = table[[b, a], device, column]
                table[[a, b], device, column] = slots
                return dataclasses.replace(program, table=table)
    raise ValueError("no device holds two microbatches at once: nothing to swap")
