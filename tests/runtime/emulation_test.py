"""Tasks that sleep and a step that notes its times, on two devices of this process."""

from __future__ import annotations

import itertools
import time
from typing import NamedTuple

import jax
import numpy as np
import pytest

from optimus_jax.data.noise import random_batch
from optimus_jax.models.mllm import Mllm
from optimus_jax.parallel.mesh import make_meshes
from optimus_jax.parallel.stages import stage_tree
from optimus_jax.runtime.clock import MARKS, Clock
from optimus_jax.runtime.comparison import grid_of, random_params
from optimus_jax.runtime.compilation import quick_compile
from optimus_jax.runtime.executor import Executor
from optimus_jax.runtime.feed import put_global
from optimus_jax.runtime.small_plan import SmallPlan
from optimus_jax.schedule.lower import lower
from optimus_jax.schedule.methods import schedule
from optimus_jax.schedule.program import Program, fit_together
from optimus_jax.schedule.simulate import Durations, EncoderDurations
from optimus_jax.timeline import view

PLAN = SmallPlan(2, 1, 1, 2)
PIPE = PLAN.pipeline
# unlike on both devices, in milliseconds; an encoder unit takes 4 forward and 8 backward
DURATIONS = Durations(
    (0.004, 0.008), (0.012, 0.016), (EncoderDurations((0.001,) * 4, (0.002,) * 4),)
)


NAMES = ("text_only", "phased", "filled")


class Ran(NamedTuple):
    """One emulated step: its seconds by the caller's clock, and the marks of its own."""

    program: Program
    began: float
    ended: float
    marks: dict[int, np.ndarray]


@pytest.fixture(scope="module")
def ran() -> dict[str, Ran]:
    """Three methods in one compiled step, each run once before it counts."""
    model, clock, rows = Mllm(PLAN.sizes), Clock(), PLAN.rows
    programs = [lower(schedule(m, "1f1b", PIPE, DURATIONS), DURATIONS, bucket=1) for m in NAMES]
    programs = fit_together(programs)
    executor = Executor(
        model,
        PIPE,
        make_meshes(grid_of(PLAN), jax.devices()),
        programs[0].slots,
        rows,
        emulate=DURATIONS,
        clock=clock,
    )
    host = jax.tree.map(np.asarray, stage_tree(random_params(model), PIPE, PLAN.names))
    params = jax.tree.map(put_global, host, executor.weight_shardings())
    batch = executor.feed.batch(random_batch(model.config, PIPE.microbatches * rows))
    step = executor.gradient_step(quick_compile())
    found = {}
    for name, program in zip(NAMES, programs, strict=True):
        for _ in range(2):
            clock.take()
            began = time.monotonic()
            jax.block_until_ready(step(params, batch, *executor.feed.tables(program)))
            ended = time.monotonic()
        found[name] = Ran(program, began, ended, clock.take())
    assert step._cache_size() == 1
    assert clock.take() == {}, "what was taken is forgotten"
    return found


METHODS = pytest.mark.parametrize("method", NAMES)


@METHODS
def test_an_emulated_step_takes_the_programs_time(ran: dict[str, Ran], method: str) -> None:
    program, began, ended, _ = ran[method]
    least = program.end(DURATIONS)
    assert least > 0.06
    assert least <= ended - began < 3 * least + 0.5


@METHODS
def test_the_clock_has_all_marks_in_order(ran: dict[str, Ran], method: str) -> None:
    program, began, ended, marks = ran[method]
    assert sorted(marks) == [0, 1]
    for times in marks.values():
        assert times.shape == (program.ticks, MARKS) == (program.ticks, 3)
        assert (np.diff(times.ravel()) >= 0).all()
        assert began <= times[0, 0] and times[-1, -1] <= ended


@METHODS
def test_every_task_sleeps_as_long_as_it_would_take_on_its_device(
    ran: dict[str, Ran], method: str
) -> None:
    program, *_, marks = ran[method]
    count = 0
    for tick, device in itertools.product(range(program.ticks), (0, 1)):
        task, times = program.task(tick, device), marks[device][tick]
        if task is not None:
            count += 1
            assert times[1] - times[0] >= DURATIONS.of(task, device, PIPE), str(task)
    assert count == sum(map(len, program.time(DURATIONS)))


@METHODS
def test_who_receives_begins_after_the_sender_has_ended(ran: dict[str, Ran], method: str) -> None:
    program, *_, marks = ran[method]
    met = np.flatnonzero(program.pattern)
    assert len(met)
    for tick in met:
        assert min(marks[d][tick, 2] for d in (0, 1)) >= max(marks[d][tick, 1] for d in (0, 1))


@METHODS
def test_a_measured_view_shows_the_same_tasks(ran: dict[str, Ran], method: str) -> None:
    program, began, ended, marks = ran[method]
    times = [marks[d] - began for d in (0, 1)]
    shown = view.measured(program, times, ended - began)
    for device, row in zip(shown["devices"], program.time(DURATIONS), strict=True):
        assert [t["name"] for t in device["tasks"]] == [str(task) for task, *_ in row]
        assert device["tasks"][-1]["end"] <= shown["epilogue_s"][0] <= shown["end_s"]
