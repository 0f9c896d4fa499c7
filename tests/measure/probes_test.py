"""Probes: Programs that repeat one task, as tables and in the compiled step."""

from __future__ import annotations

import collections

import jax
import numpy as np
import pytest

from optimus_jax.measure import probes
from optimus_jax.measure.probes import Probe, program
from optimus_jax.measure.profile import WORDS
from optimus_jax.runtime.comparison import Bench
from optimus_jax.runtime.small_plan import SmallPlan, Tower
from optimus_jax.schedule.program import (
    KINDS,
    Columns,
    EncoderSlots,
    Payload,
    Program,
    Shape,
    Slots,
    alphabet,
    task_of,
)
from optimus_jax.schedule.task import EncoderPipeline, Kind, Pipeline, Task

REPEATS = 2


def encoder(*layers: int) -> EncoderPipeline:
    return EncoderPipeline(layers)


PIPES = [
    Pipeline(1, 1, encoders=(encoder(3),)),
    Pipeline(2, 1, llm_layers=(2, 3), encoders=(encoder(1),)),
    Pipeline(2, 4, chunks=2, llm_layers=(3, 2, 2, 2), encoders=(encoder(4),)),
    Pipeline(4, 8, llm_layers=(2, 2, 2, 1), encoders=(encoder(2, 1), encoder(2))),
    Pipeline(4, 4, llm_layers=(0, 1, 2, 2), encoders=(EncoderPipeline((2, 1, 0, 0), 1),)),
]
FUSES = [False, False, True, True, False]
CASES = [
    (pipe, probe, fuse)
    for pipe, fuse in zip(PIPES, FUSES, strict=True)
    for probe in probes.probes(pipe, REPEATS, fuse)
]
IDS = [f"pp{pipe.stages} M{pipe.microbatches} {probe.name}" for pipe, probe, _ in CASES]
every_probe = pytest.mark.parametrize(("pipe", "probe", "fuse"), CASES, ids=IDS)


def both(pipe: Pipeline, probe: Probe, fuse: bool = False) -> tuple[Program, Program]:
    """A probe's Program with its task and without, in the least shape of a profile."""
    shape = probes.shape(pipe, REPEATS, fuse)
    with_it, without = (program(probe, pipe, shape, run) for run in (True, False))
    return with_it, without


def repeated(pipe: Pipeline, probe: Probe, fuse: bool = False) -> list[int]:
    """The ticks in which the two differ."""
    with_it, without = both(pipe, probe, fuse)
    rows = (with_it.table != without.table).any(axis=(1, 2))
    return [int(t) for t in np.flatnonzero(rows | (with_it.pattern != without.pattern))]


@every_probe
def test_without_its_task_a_probe_is_the_same_table_but_for_the_repeats(
    pipe: Pipeline, probe: Probe, fuse: bool
) -> None:
    with_it, without = both(pipe, probe, fuse)
    ticks = repeated(pipe, probe, fuse)
    assert len(ticks) == probe.repeats >= REPEATS
    assert ticks == list(range(with_it.used_ticks - probe.repeats, with_it.used_ticks))
    assert not without.pattern.any()
    if probe.kind is None:  # each exchange follows a short task, which runs without it too
        assert (without.table == with_it.table).all()
    else:
        assert without.used_ticks == ticks[0], "nothing but the preparation"
        assert (without.table[ticks] == with_it.columns.idle_row()).all()


@every_probe
def test_every_repeat_is_the_task_on_all_devices(pipe: Pipeline, probe: Probe, fuse: bool) -> None:
    table, at = both(pipe, probe, fuse)[0], Columns(pipe)
    for tick in repeated(pipe, probe, fuse):
        rows = table.table[tick]
        assert (rows == rows[0]).all()
        task, row = task_of(rows[0], pipe, 0), rows[0]
        assert task is not None and task.kind == (probe.kind or Kind.F)
        pattern = alphabet(pipe)[table.pattern[tick]]
        assert bool(pattern.links) == (probe.kind is None)
        if probe.moved:
            assert pattern.payload == probe.moved
            used, other = ("e_", "") if probe.moved.content != "llm" else ("", "e_")
            for name in ("send", "receive"):
                assert np.max(row[at[used + name]]) == 0
                assert np.max(row[at[other + name]]) < 0
        part = task.encoder_part
        assert bool(part) == (probe.fused or bool(probe.kind and probe.kind.is_encoder))
        if part:
            assert (row[at["begin"]], row[at["end"]]) == (probe.begin, probe.end)
            assert len(pipe.units_of(part)) == 1 and part.encoder == probe.encoder
            assert part.kind == (task.kind.inside if probe.fused else task.kind)
            ends = row[at["embeds"]], row[at["projects"]]
            assert ends == (probe.embeds, probe.projects)
            slot = at["e_write"] if part.kind == Kind.EF else at["e_read"]
            assert (np.max(row[slot]) == 0) == probe.projects, "features, or their gradient"
        if task.llm_part:
            assert (row[at["layers"]], row[at["first"]], row[at["last"]]) == (
                *(probe.layers, probe.first, probe.last),
            )
            assert row[at["write"]] < 0, "what the task reads must not be written over"
        assert 0 <= task.microbatch < pipe.microbatches and 0 <= task.chunk < pipe.chunks


def test_the_probes_are_the_parts_that_a_step_is_made_of() -> None:
    pipe = Pipeline(4, 4, llm_layers=(3, 2, 2, 2), encoders=(encoder(4, 4), encoder(2)))
    found = {p.name: p for p in probes.probes(pipe, REPEATS, fuse=True)}
    second = [f"{kind} {part} 1" for kind in ("EF", "EB") for part in PARTS]
    assert found.keys() | {"epilogue"} == {*WORDS, *second, "feature exchange 1"}
    texts = collections.defaultdict(set)
    for p in found.values():
        table = both(pipe, p, fuse=True)[0]
        texts[p.name] = {str(table.task(t, 1)) for t in repeated(pipe, p, fuse=True)}
    assert texts["F layers"] == {"F0", "F1"}
    assert texts["B none"] == {f"B{i}" for i in range(4)}
    # device 1 is the second stage of the first encoder
    assert texts["EF whole"] == {"EF0.0", "EF1.1", "EF2.0", "EF3.1"}
    assert texts["EF whole 1"] == {f"EF{i}e1.{i}" for i in range(4)}
    assert texts["EB patches"] == {f"EB{i}.{i % 2}[4:4)" for i in range(4)}
    assert texts["EF projector"] == {f"EF{i}.{i % 2}[8:8)" for i in range(4)}
    assert texts["F fused"] == {f"F{i}|EF{i}.{i}[4:6)" for i in range(2)}
    assert found["F layers"].layers == found["B layers"].layers == 3


PARTS = "whole", "patches", "projector"


def test_one_device_has_nobody_to_exchange_with() -> None:
    assert all(p.kind is not None for p in probes.probes(Pipeline(1, 2), REPEATS))


def test_features_that_never_leave_their_device_are_not_probed() -> None:
    pipe = Pipeline(2, 2, encoders=(EncoderPipeline((3, 0), 1),))
    assert not [p for p in probes.probes(pipe, REPEATS) if p.moved and p.moved != Payload("llm")]


@every_probe
def test_slots_and_ticks_fit_the_shape_of_a_profile(
    pipe: Pipeline, probe: Probe, fuse: bool
) -> None:
    shape = probes.shape(pipe, REPEATS, fuse)
    least = Slots(1, 1, (EncoderSlots(1, 0, 1),) * len(pipe.encoders))
    assert shape.slots.covering(least) == shape.slots
    at, own = Columns(pipe), shape.slots.encoders[probe.encoder]
    hidden = probe.moved is not None and probe.moved.content == "hidden"
    sizes = {
        **dict.fromkeys(("read", "write", "send", "receive"), shape.slots.wire),
        **dict.fromkeys(("e_read", "e_write", "e_send", "e_receive"), own.feature),
        **{"saved": shape.slots.saved, "e_saved": own.saved},
    }
    assert not hidden or own.hidden
    for made in both(pipe, probe, fuse):
        assert made.shape == shape
        assert made.table.dtype == made.pattern.dtype == np.int32
        for name, size in sizes.items():
            assert made.table[:, :, at[name]].max() < size, name


def test_saved_inputs_are_read_from_every_slot_in_turn() -> None:
    pipe = Pipeline(2, 4, encoders=(encoder(2),))
    shape = Shape(99, Slots(1, 2, (EncoderSlots(1, 0, 4),)), 0, 0)
    for kind, column in ((Kind.B, "saved"), (Kind.EB, "e_saved")):
        for probe in (p for p in probes.probes(pipe, 2) if p.kind == kind):
            table = program(probe, pipe, shape, True)
            used = table.table[repeated(pipe, probe), 0, Columns(pipe)[column]].reshape(-1)
            count = min(2 if kind == Kind.B else 4, probe.repeats)
            assert set(used[used >= 0]) == set(range(count)), probe.name


@pytest.mark.parametrize("pipe", PIPES, ids=lambda p: f"pp{p.stages}")
def test_too_few_ticks_are_refused(pipe: Pipeline) -> None:
    shape = probes.shape(pipe, REPEATS)
    longest = 0
    for probe in probes.probes(pipe, REPEATS):
        needed = program(probe, pipe, shape, True).used_ticks
        longest = max(longest, needed)
        program(probe, pipe, shape._replace(ticks=needed), True)
        with pytest.raises(ValueError, match=f"{needed} ticks do not fit into {needed - 1}"):
            program(probe, pipe, shape._replace(ticks=needed - 1), True)
    assert longest == shape.ticks, "no more than the longest needs"


def test_no_probe_is_an_idle_program() -> None:
    pipe = Pipeline(2, 4)
    idle = program(None, pipe, Shape(7, Slots(1, 1, (EncoderSlots(1, 0, 1),)), 0, 0), False)
    assert (idle.ticks, idle.used_ticks) == (7, 0)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(SmallPlan(2, 1, 2, 4), marks=pytest.mark.slow),
        SmallPlan(2, 1, 1, 4, tp=2, towers=(Tower(pp=2), Tower("audio", tp=2))),
        SmallPlan(1, 1, 1, 2, tp=2, fuse=True),
    ],
    ids=["chunks", "two encoders", "fused"],
)
def test_the_compiled_step_runs_each_task_its_times_on_finite_numbers(plan: SmallPlan) -> None:
    """Buffers begin as NaN, and a task whose result is NaN is counted. With sound weights none is;
    with weights of NaN every run of a task is one more, so the count says how often it ran."""
    bench = Bench(plan)
    pipe = bench.pipe
    executor = bench.executor(program(None, pipe, probes.shape(pipe, REPEATS, plan.fuse), False))
    step, params = executor.gradient_step(bench.options), bench.staged(executor, bench.params)
    batch = executor.feed.batch(bench.batch)
    broken = jax.tree.map(lambda w: w * np.nan, params)
    for probe in probes.probes(pipe, REPEATS, plan.fuse):
        counts = []
        for made in both(pipe, probe, plan.fuse):
            tables = executor.feed.tables(made)
            nans = np.asarray(step(params, batch, *tables)[2])
            assert not nans.any(), probe.name
            counts.append(np.asarray(step(broken, batch, *tables)[2]))
        # the encoder's part of a fused task counts at its end, as the task itself does
        times = probe.repeats * (2 if probe.fused else 1)
        assert (counts[0] - counts[1]).tolist() == [times] * nans.size, probe.name
    assert step._cache_size() == 1


def test_tasks_without_layers_are_not_written_in_schedules() -> None:
    """They are legal in a table only."""
    pipe = Pipeline(2, 2, encoders=(encoder(4),))
    at = Columns(pipe)
    row = at.idle_row()
    row[at["e_kind"]], row[at["count"]] = KINDS[Kind.EF], 1
    assert task_of(row, pipe, 0) == Task(Kind.EF, 0, units=(0,), layers=(0, 0))
    with pytest.raises(ValueError, match="has no layers"):
        Task.parse(str(task_of(row, pipe, 0)))
