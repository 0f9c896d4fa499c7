"""The memory table against XLA's own analysis of the compiled step."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import pytest

from optimus_jax.config import (
    Config,
    DataConfig,
    EncoderConfig,
    EncoderParallel,
    LlmConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
)
from optimus_jax.parallel.stages import stage_tree
from optimus_jax.runtime import slots as slot_buffers
from optimus_jax.runtime.abstract_step import traced_step
from optimus_jax.runtime.compilation import quick_compile
from optimus_jax.runtime.executor import Executor
from optimus_jax.runtime.liveness import moments
from optimus_jax.runtime.memory import MemoryTable, Row, measured_bytes, memory_table
from optimus_jax.schedule.lower import lower
from optimus_jax.schedule.methods import schedule
from optimus_jax.schedule.program import Program
from optimus_jax.schedule.simulate import Durations
from tests.runtime.stray_work import copies_beside_loops, copies_in_loops

ROWS = 4  # of a microbatch
LARGE = 1 << 14  # values of an array that should not be copied
# No activation has the shape of a weight: copies are told apart by shapes.
MODEL = ModelConfig(
    dtype="float32",
    image_height=32,
    image_width=64,
    text_length=40,
    encoder=EncoderConfig(4, 192, 4, 768, 8),
    projector_hidden=224,
    llm=LlmConfig(4, 384, 6, 1536),
    vocabulary=128,
)


def config(
    dp: int = 1,
    microbatches: int = 4,
    tp: int = 1,
    encoder: EncoderParallel | None = None,
    dtype: str = "float32",
    method: str = "encoder_first",
    **parallel: Any,
) -> Config:
    plan = ParallelConfig(
        dp,
        2,
        1,
        microbatches,
        "1f1b",
        method,
        tp=tp,
        encoder=encoder or EncoderParallel(tp=tp),
        **parallel,
    )
    train = TrainConfig(0, ROWS * microbatches * dp, 10, 1e-3, 1, 0.1, 1.0, 1, 1, 1)
    model = dataclasses.replace(MODEL, dtype=dtype)
    return Config("cpu_core", model, DataConfig("digits"), plan, train, 8)


def program(config: Config) -> Program:
    durations = Durations.uniform(config.pipeline, encoder=0.5)
    made = schedule(config.parallel.method, config.parallel.order, config.pipeline, durations)
    return lower(made, durations)


@dataclasses.dataclass(frozen=True)
class Compiled:
    config: Config
    executor: Executor
    table: MemoryTable
    masters: Any
    carry: Any
    held: int
    measured: int
    hlo: str

    @property
    def error(self) -> float:
        return self.table.total / self.measured - 1


def traced(config: Config) -> tuple[Executor, MemoryTable, Any]:
    executor, step = traced_step(config, program(config), jax.devices())
    return executor, memory_table(executor, step), step


def compiled(config: Config) -> Compiled:
    executor, table, step = traced(config)
    masters = step.args_info[0][0].params
    done = step.lower().compile(compiler_options=quick_compile())
    scan = max(moments(step.jaxpr.jaxpr, emulated=True), key=lambda m: m.inside)
    return Compiled(
        config,
        executor,
        table,
        masters,
        slot_buffers.shapes(executor, masters),
        scan.held,
        measured_bytes(done)["total"],
        done.as_text(),
    )


def staged(executor: Executor) -> Any:
    """Shapes of the staged weights."""

    def make(key: Any) -> Any:
        return stage_tree(executor.model.init(key), executor.pipe, executor.encoders)

    return jax.eval_shape(make, jax.random.key(0))


# Weights cut over replicas and whole; layers cut over tensor shards, activations kept.
PLANS = [
    config(dp=2),
    config(tp=2, recompute="selective", encoder=EncoderParallel(recompute="none"), zero=False),
]
MORE = [
    config(),
    config(recompute="none", encoder=EncoderParallel(recompute="selective")),
    config(method="filled", encoder=EncoderParallel(pp=2)),
    config(dp=2, tp=2, method="filled"),
    config(dp=2, dtype="bfloat16"),
    config(dp=2, dtype="bfloat16", gradients="bfloat16"),
]


def named(config: Config) -> str:
    p = config.parallel
    return f"dp{p.dp}-tp{p.tp}-{p.recompute}-{p.method}-{config.model.dtype}-{p.gradients}"


@pytest.fixture(scope="module", params=PLANS, ids=named)
def plan(request: pytest.FixtureRequest) -> Compiled:
    return compiled(request.param)


def test_predicted_bytes_are_within_a_tenth_of_xlas(plan: Compiled) -> None:
    assert abs(plan.error) < 0.1, f"{plan.error:+.1%}\n{plan.table}"


@pytest.mark.slow
@pytest.mark.parametrize("more", MORE, ids=named)
def test_predicted_bytes_of_more_plans(more: Config) -> None:
    plan = compiled(more)
    assert abs(plan.error) < 0.1, f"{plan.error:+.1%}\n{plan.table}"
    assert not _copies(plan)


def test_nothing_is_copied_beyond_the_table(plan: Compiled) -> None:
    assert not _copies(plan)


def _copies(plan: Compiled) -> list[str]:
    """Copies of what the carry holds, and outside of all loops of master weights, too."""
    kept = [x.shape for x in jax.tree.leaves(plan.carry) if math.prod(x.shape) >= LARGE]
    masters = jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(where.shard_shape(x.shape), x.dtype),
        plan.masters,
        plan.executor.weight_shardings(),
    )
    shards = [x.shape for x in jax.tree.leaves(masters) if math.prod(x.shape) >= LARGE]
    if plan.config.model.dtype != "float32":
        # CPUs cast: a weight at the start, and each product before it is added to its gradient
        return copies_in_loops(plan.hlo, [shape for shape in kept if len(shape) > 2])
    return copies_in_loops(plan.hlo, kept) + copies_beside_loops(plan.hlo, kept + shards)


def test_the_table_lists_every_array_of_the_step(plan: Compiled) -> None:
    """What the shapes say, and what the trace holds while the ticks run, are the same."""
    inputs = ("master weights", "optimiser state", "batch", "tables")
    listed = plan.table.ticks - plan.table["working set of a task"].ticks
    listed -= sum(plan.table[name].ticks for name in inputs)
    assert plan.held == pytest.approx(listed, rel=0.01)


def test_zero_and_the_dtype_of_gradients_show_in_the_table() -> None:
    whole = traced(config(dp=2, zero=False))[1]
    cut = traced(config(dp=2, gradients="bfloat16"))[1]
    # all large weights are cut: the LLM's in two by dp, the encoder's in four by pp x dp
    assert cut["optimiser state"].ticks < 0.5 * whole["optimiser state"].ticks
    assert whole["gathered weights"].ticks == 0 < cut["gathered weights"].ticks
    assert cut["gradient sums"].ticks == pytest.approx(whole["gradient sums"].ticks / 2, rel=0.01)


def test_a_cap_bounds_encoder_activations() -> None:
    """At 64 microbatches no more bytes than at 8; without a cap they grow eightfold."""

    def slots(microbatches: int, **options: Any) -> int:
        c = config(microbatches=microbatches, **options)
        executor = Executor.of(c, program(c).slots, jax.devices())
        (vision,) = slot_buffers.shapes(executor, staged(executor)).encoders
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(vision))

    assert slots(64, encoder_cap=4) <= slots(8, encoder_cap=4)
    assert slots(64, method="phased") > 6 * slots(8, method="phased")


@pytest.mark.slow
def test_more_microbatches_make_no_larger_program() -> None:
    few, many = (compiled(config(microbatches=m, encoder_cap=4)) for m in (8, 64))
    assert len(many.hlo) == pytest.approx(len(few.hlo), rel=0.1)
    assert many.hlo.count(" = ") == pytest.approx(few.hlo.count(" = "), rel=0.1)
    assert many.table.activations("vision") <= few.table.activations("vision")


def test_a_table_reads_and_prints() -> None:
    table = MemoryTable((Row("master weights", 3_000_000, 3_000_000), Row("llm saved", 500, 0)))
    assert table.total == table.ticks == 3_000_500 and table.after == 3_000_000
    assert MemoryTable.from_json(table.to_json()) == table
    assert table.activations("llm") == 500
    lines = str(table).splitlines()
    assert lines[1].split() == ["master", "weights", "3.000", "3.000"]
    assert len({len(line) for line in lines}) == 1
