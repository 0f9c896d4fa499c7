"""Plans that the planner writes, on the executor: read back, proved, run, and refused in words."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections import defaultdict

import pytest

from optimus_jax.plan.answer import answer as answer_to
from optimus_jax.plan.cluster import Assumptions, Cluster, EncoderSpec, LlmPlan, LlmSpec
from optimus_jax.plan.execution import (
    KEY,
    Execution,
    load_execution,
    written,
)
from optimus_jax.plan.outcome import Answer
from optimus_jax.plan.realisation import executed, execution_values
from optimus_jax.runtime.comparison import Bench
from optimus_jax.runtime.small_plan import SmallPlan, Tower
from optimus_jax.schedule.program import fit_together
from optimus_jax.schedule.task import Pipeline, ScheduleError

LLM = LlmSpec("own", 128, layers=4, width=64, heads=4, hidden=256)
VIT = EncoderSpec("image", 256, 16, layers=4, width=64, heads=4, hidden=256)
# An LLM layer waits as long for its collectives as it computes.
ASSUME = Assumptions(efficiency=5e-6, tp_collective_s=50.0, dp_exposed_s=1e-3)


@functools.cache
def answer(stages: int, tp: int, chunks: int = 1, dp: int = 1, tokens: int = 256) -> Answer:
    """Two ranks of two devices, four microbatches of 8 samples."""
    encoder = dataclasses.replace(VIT, stages=stages, tp=tp, tokens=tokens)
    plan = LlmPlan(dp=dp, pp=2, tp=2, chunks=chunks, microbatch=8)
    return answer_to(Cluster("h100", 4 * dp, 32 * dp, LLM, {"image": encoder}, plan, ASSUME))


def through_file(folder: pathlib.Path, found: Answer, method: str) -> Execution:
    methods = {method: written(executed(found, method))}
    values = {KEY: execution_values(found)}
    values[KEY]["methods"] |= methods
    (folder / "plan.json").write_text(json.dumps(values))
    return load_execution(folder / "plan.json", method)


def test_a_plan_comes_back_from_its_file(tmp_path: pathlib.Path) -> None:
    found = answer(2, 1)
    for method in ("fine", "filled"):
        made = executed(found, method)
        read = through_file(tmp_path, found, method)
        assert read.schedule == made.schedule
        for name in ("method", "dp", "tp", "rows", "encoders", "durations", "planned_s"):
            assert getattr(read, name) == getattr(made, name)
        assert (read.dp, read.pipeline.stages, read.tp, read.encoders) == (1, 2, 2, ((2, 1),))
        assert (read.pipeline.microbatches, read.rows, read.devices) == (4, 8, 4)


BESIDE = ("coarse", "fine", "filled", "phased")
INSIDE = ("encoder_first", "encoder_first_tuned", "balanced")


@pytest.mark.parametrize("sizes", [(1, 1), (2, 2), (1, 2, 2), (2, 1, 1, 2), (1, 1, 2, 1, 64)])
def test_every_method_has_a_sound_program(sizes: tuple[int, ...]) -> None:
    found = answer(*sizes)
    for method in (*BESIDE, *INSIDE):
        if method == "balanced" and sizes == (1, 2, 2):
            with pytest.raises(ScheduleError, match="the first 2 virtual stages only, not"):
                executed(found, method)
            continue
        made = executed(found, method)
        program = made.program()  # validated
        assert made.event_driven_s <= program.end(made.durations) + 1e-9
        # half of these steps is time beside collectives, of which whole layers use less
        most = 1.16 if method in BESIDE else 1.001
        assert made.event_driven_s < most * made.planned_s, f"{method} on {sizes}"


def test_where_slots_are_not_used_the_step_is_the_planners() -> None:
    found = answer(1, 2, tokens=64)
    for method in ("coarse", "fine", "filled", "phased"):
        made = executed(found, method)
        assert made.program().end(made.durations) == pytest.approx(made.planned_s, rel=1e-3)


def test_copies_are_lanes() -> None:
    """Two copies of a pipeline on a rank are one of two lanes, which takes half the time."""
    one, two = executed(answer(1, 2), "coarse"), executed(answer(1, 1), "coarse")
    assert two.encoders == ((1, 1),) and one.encoders == ((1, 2),)
    # without the collectives of two shards a layer takes a little less
    times = [made.durations.encoders[0].forward[0] for made in (one, two)]
    assert times[1] == pytest.approx(times[0], rel=0.01)


@dataclasses.dataclass(frozen=True)
class Planned(SmallPlan):
    """A small model on the pipeline of a plan."""

    own: Pipeline | None = None

    @property
    def pipeline(self) -> Pipeline:
        assert self.own
        return self.own


def ranges(execution: Execution) -> bool:
    tasks = (task for order in execution.schedule.orders for task in order)
    return any(task.encoder_part and task.encoder_part.layers for task in tasks)


# Sizes, methods, and what their schedules must have.
RUNS = {
    "two encoder stages": ((2, 2), ("fine", "filled"), {"fused"}),
    "two chunks": ((1, 2, 2, 1, 512), ("fine",), {"fused", "ranges"}),
    "replicas and lanes": ((1, 1, 1, 2, 64), ("coarse", "filled"), {"units"}),
}


def kinds(execution: Execution) -> set[str]:
    found = {"fused"} if execution.fused else set()
    for task in (task for order in execution.schedule.orders for task in order):
        part = task.encoder_part
        found |= {"ranges"} if part and part.layers else set()
        found |= {"units"} if part and len(part.units) == 1 else set()
    return found


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "two encoder stages" else ())
        for name in RUNS
    ],
)
def test_the_executor_runs_what_the_planner_writes(name: str, tmp_path: pathlib.Path) -> None:
    sizes, methods, wanted = RUNS[name]
    found = answer(*sizes)
    executions = [through_file(tmp_path, found, method) for method in methods]
    assert set().union(*map(kinds, executions)) >= wanted
    by_pipe: dict[Pipeline, list[Execution]] = defaultdict(list)
    for execution in executions:
        by_pipe[execution.pipeline].append(execution)
    for pipe, mine in by_pipe.items():
        first, ((pp, tp),) = mine[0], mine[0].encoders
        small = Planned(
            pipe.stages,
            first.dp,
            pipe.chunks,
            pipe.microbatches,
            first.tp,
            (Tower(pp=pp, tp=tp),),
            zero=True,
            fuse=any(one.fused for one in mine),
            own=pipe,
        )
        bench, programs = Bench(small), fit_together([one.program() for one in mine])
        executor = bench.executor(programs[0])
        step, params = executor.gradient_step(bench.options), bench.staged(executor, bench.params)
        batch = executor.feed.batch(bench.batch)
        for one, program in zip(mine, programs, strict=True):
            loss, grads, _ = step(params, batch, *executor.feed.tables(program))
            errors = bench.errors(loss, grads, images=True)
            assert errors[0] < 1e-6 and errors[1] < 1e-5, f"{one.method}: {errors}"
