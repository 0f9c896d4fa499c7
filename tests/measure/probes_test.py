"""Probes: Programs that repeat one task, as tables and in the compiled step."""

from __future__ import annotations

import collections

import jax
import numpy as np
import pytest

from optimus_jax.measure import probes, profile
from optimus_jax.measure.probes import Probe, program, ticks_needed
from optimus_jax.runtime.comparison import Bench
from optimus_jax.schedule.program import Columns, Program, Slots, alphabet, task_of
from optimus_jax.schedule.task import Kind, Pipeline, Task

REPEATS = 2
PIPES = [
    Pipeline(1, 1, encoder_layers=3),
    Pipeline(2, 1, llm_layers=(2, 3), encoder_layers=1),
    Pipeline(2, 4, chunks=2, llm_layers=(3, 2, 2, 2), encoder_layers=4),
    Pipeline(4, 8, llm_layers=(2, 2, 2, 1), encoder_layers=2),
]
CASES = [(pipe, probe) for pipe in PIPES for probe in probes.probes(pipe, REPEATS)]
IDS = [f"pp{pipe.stages} M{pipe.microbatches} {probe.name}" for pipe, probe in CASES]
every_probe = pytest.mark.parametrize(("pipe", "probe"), CASES, ids=IDS)


def both(pipe: Pipeline, probe: Probe) -> tuple[Program, Program]:
    """A probe's Program with its task and without, in the least shape of a profile."""
    slots, ticks = profile.shape(pipe)
    with_it, without = (program(probe, pipe, slots, ticks, run) for run in (True, False))
    return with_it, without


def repeated(pipe: Pipeline, probe: Probe) -> list[int]:
    """The ticks in which the two differ."""
    with_it, without = both(pipe, probe)
    rows = (with_it.table != without.table).any(axis=(1, 2))
    return [int(t) for t in np.flatnonzero(rows | (with_it.pattern != without.pattern))]


@every_probe
def test_without_its_task_a_probe_is_the_same_table_but_for_the_repeats(
    pipe: Pipeline, probe: Probe
) -> None:
    with_it, without = both(pipe, probe)
    ticks = repeated(pipe, probe)
    assert len(ticks) == probe.repeats >= REPEATS
    assert ticks == list(range(with_it.used_ticks - probe.repeats, with_it.used_ticks))
    assert not without.pattern.any()
    if probe.kind is None:  # each exchange follows a short task, which runs without it too
        assert (without.table == with_it.table).all()
    else:
        assert without.used_ticks == ticks[0], "nothing but the preparation"
        assert (without.table[ticks] == with_it.columns.idle_row()).all()


@every_probe
def test_every_repeat_is_the_task_on_all_devices(pipe: Pipeline, probe: Probe) -> None:
    table, at = both(pipe, probe)[0], Columns(pipe.units)
    for tick in repeated(pipe, probe):
        rows = table.table[tick]
        assert (rows == rows[0]).all()
        task, row = task_of(rows[0], pipe), rows[0]
        assert task is not None and task.kind == (probe.kind or Kind.F)
        pattern = alphabet(pipe)[table.pattern[tick]]
        assert bool(pattern.links) == (probe.kind is None)
        if probe.kind is None:
            assert pattern.features == probe.features
            sent, received = (
                ("feature_send", "feature_receive")
                if probe.features
                else (
                    "send",
                    "receive",
                )
            )
            assert np.max(row[at[sent]]) >= 0 and np.max(row[at[received]]) >= 0
            other = "send" if probe.features else "feature_send"
            assert np.max(row[at[other]]) < 0
        if task.kind.is_encoder:
            assert pipe.layers_of(task) == (probe.begin, probe.end)
            assert len(pipe.units_of(task)) == 1
        else:
            assert (row[at["layers"]], row[at["first"]], row[at["last"]]) == (
                *(probe.layers, probe.first, probe.last),
            )
            assert row[at["write"]] < 0, "what the task reads must not be written over"
        assert 0 <= task.microbatch < pipe.microbatches and 0 <= task.chunk < pipe.chunks


def test_the_probes_are_the_parts_that_a_step_is_made_of() -> None:
    pipe = Pipeline(2, 4, llm_layers=(3, 2), encoder_layers=4)
    found = {p.name: p for p in probes.probes(pipe, REPEATS)}
    assert found.keys() | {"epilogue"} == profile.WORDS.keys()
    texts = collections.defaultdict(set)
    for p in found.values():
        table = both(pipe, p)[0]
        texts[p.name] = {str(table.task(t, 1)) for t in repeated(pipe, p)}
    assert texts["F layers"] == {"F0", "F1"}
    assert texts["B none"] == {f"B{i}" for i in range(4)}
    assert texts["EF whole"] == {"EF0.0", "EF1.1", "EF2.0", "EF3.1"}
    assert texts["EB patches"] == {f"EB{i}.{i % 2}[0:0)" for i in range(4)}
    assert texts["EF projector"] == {f"EF{i}.{i % 2}[4:4)" for i in range(4)}
    assert found["F layers"].layers == found["B layers"].layers == 3


def test_one_device_has_nobody_to_exchange_with() -> None:
    assert all(p.kind is not None for p in probes.probes(Pipeline(1, 2), REPEATS))


@every_probe
def test_slots_and_ticks_fit_the_shape_of_a_profile(pipe: Pipeline, probe: Probe) -> None:
    slots, ticks = profile.shape(pipe)
    assert slots.covering(Slots(1, 1, 1, 1)) == slots
    at = Columns(pipe.units)
    sizes = {
        **dict.fromkeys(("read", "write", "send", "receive"), slots.wire),
        **dict.fromkeys(("feature", "feature_send", "feature_receive"), slots.feature),
        **{"saved": slots.saved, "encoder": slots.encoder},
    }
    for made in both(pipe, probe):
        assert (made.ticks, made.slots) == (ticks, slots)
        assert made.table.dtype == made.pattern.dtype == np.int32
        for name, size in sizes.items():
            assert made.table[:, :, at[name]].max() < size, name


def test_saved_inputs_are_read_from_every_slot_in_turn() -> None:
    pipe, slots = Pipeline(2, 4, encoder_layers=2), Slots(1, 1, 2, 4)
    for kind, column in ((Kind.B, "saved"), (Kind.EB, "encoder")):
        for probe in (p for p in probes.probes(pipe, 2) if p.kind == kind):
            table = program(probe, pipe, slots, 99, True)
            used = table.table[repeated(pipe, probe), 0, Columns(2)[column]].reshape(-1)
            count = min(slots.saved if kind == Kind.B else slots.encoder, probe.repeats)
            assert set(used[used >= 0]) == set(range(count)), probe.name


@pytest.mark.parametrize("pipe", PIPES, ids=lambda p: f"pp{p.stages}")
def test_too_few_ticks_are_refused(pipe: Pipeline) -> None:
    slots, ticks = profile.shape(pipe)
    assert ticks == ticks_needed(pipe, slots, profile.REPEATS)
    longest = 0
    for probe in probes.probes(pipe, profile.REPEATS):
        needed = program(probe, pipe, slots, ticks, True).used_ticks
        longest = max(longest, needed)
        program(probe, pipe, slots, needed, True)
        with pytest.raises(ValueError, match=f"{needed} ticks do not fit into {needed - 1}"):
            program(probe, pipe, slots, needed - 1, True)
    assert longest == ticks, "no more than the longest needs"


def test_no_probe_is_an_idle_program() -> None:
    pipe = Pipeline(2, 4)
    idle = program(None, pipe, Slots(1, 1, 1, 1), 7, False)
    assert (idle.ticks, idle.used_ticks) == (7, 0)


@pytest.mark.parametrize(
    "pipe",
    [
        Pipeline(2, 4, llm_layers=(2, 1), encoder_layers=4),
        Pipeline(2, 4, chunks=2, llm_layers=(2, 1, 1, 1), encoder_layers=4),
    ],
    ids=["chunks1", "chunks2"],
)
def test_the_compiled_step_runs_each_task_its_times_on_finite_numbers(pipe: Pipeline) -> None:
    """Buffers begin as NaN, and a task whose result is NaN is counted. With sound weights none is;
    with weights of NaN every run of a task is one more, so the count says how often it ran."""
    bench = Bench(pipe, dp=1)
    executor = bench.executor(program(None, pipe, *profile.shape(pipe), False))
    step, params = executor.gradient_step(bench.options), bench.staged(executor, bench.params)
    batch = executor.place_batch(bench.batch)
    broken = jax.tree.map(lambda w: w * np.nan, params)
    for probe in probes.probes(pipe, REPEATS):
        counts = []
        for made in both(pipe, probe):
            tables = executor.place_tables(made)
            assert np.asarray(step(params, batch, *tables)[2]).tolist() == [0, 0], probe.name
            counts.append(np.asarray(step(broken, batch, *tables)[2]))
        assert (counts[0] - counts[1]).tolist() == [probe.repeats] * 2, probe.name
    assert step._cache_size() == 1


def test_tasks_without_layers_are_not_written_in_schedules() -> None:
    """They are legal in a table only."""
    pipe, at = Pipeline(2, 2, encoder_layers=4), Columns(2)
    row = at.idle_row()
    row[at["kind"]], row[at["count"]] = 3, 1
    assert task_of(row, pipe) == Task(Kind.EF, 0, units=(0,), layers=(0, 0))
    with pytest.raises(ValueError, match="has no layers"):
        Task.parse(str(task_of(row, pipe)))
