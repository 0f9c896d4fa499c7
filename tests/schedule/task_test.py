"""Notation of tasks and schedules, and the sizes of a pipeline."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus_jax.schedule.task import EncoderPipeline, Kind, Pipeline, Schedule, ScheduleError, Task

NUMBERS = st.integers(0, 300)
LLM_TASKS = st.builds(Task, st.sampled_from([Kind.F, Kind.B]), NUMBERS, NUMBERS)
ENCODER_TASKS = st.builds(
    Task,
    st.sampled_from([Kind.EF, Kind.EB]),
    NUMBERS,
    units=st.lists(NUMBERS, max_size=4, unique=True).map(tuple),
    layers=st.none() | st.tuples(NUMBERS, NUMBERS).map(lambda t: (t[0], t[0] + 1 + t[1])),
    encoder=NUMBERS,
)


def fused(outer: Task, inner: Task) -> Task:
    """The LLM task with the encoder task of its direction inside, of one unit."""
    kind = Kind.EF if outer.kind == Kind.F else Kind.EB
    inside = dataclasses.replace(inner, kind=kind, units=inner.units[:1])
    return dataclasses.replace(outer, inside=inside)


TASKS = LLM_TASKS | ENCODER_TASKS | st.builds(fused, LLM_TASKS, ENCODER_TASKS)

WRITTEN = {
    "F3": Task(Kind.F, 3),
    "B12": Task(Kind.B, 12),
    "F3c1": Task(Kind.F, 3, 1),
    "B0c10": Task(Kind.B, 0, 10),
    "EF2": Task(Kind.EF, 2),
    "EF2.1": Task(Kind.EF, 2, units=(1,)),
    "EF2.0+1": Task(Kind.EF, 2, units=(0, 1)),
    "EB0[0:4)": Task(Kind.EB, 0, layers=(0, 4)),
    "EB2.1+3[4:12)": Task(Kind.EB, 2, units=(1, 3), layers=(4, 12)),
    "EF2e1": Task(Kind.EF, 2, encoder=1),
    "EB2e1.0+3[4:12)": Task(Kind.EB, 2, units=(0, 3), layers=(4, 12), encoder=1),
    "F3|EF5.1[0:4)": Task(Kind.F, 3, inside=Task(Kind.EF, 5, units=(1,), layers=(0, 4))),
    "B3c1|EB2e1.0": Task(Kind.B, 3, 1, inside=Task(Kind.EB, 2, units=(0,), encoder=1)),
}


@pytest.mark.parametrize(("text", "task"), WRITTEN.items())
def test_every_form_of_the_notation_reads_and_prints(text: str, task: Task) -> None:
    assert Task.parse(text) == task
    assert str(task) == text


@given(TASKS)
def test_tasks_print_and_parse_back(task: Task) -> None:
    assert Task.parse(str(task)) == task


@given(st.lists(st.lists(TASKS, max_size=5).map(tuple), min_size=1, max_size=4))
def test_schedules_print_and_parse_back(orders: list[tuple[Task, ...]]) -> None:
    schedule = Schedule(Pipeline(len(orders), 1), tuple(orders))
    assert Schedule.parse(str(schedule), schedule.pipeline) == schedule


@pytest.mark.parametrize(
    "text",
    ["", "3", "G3", "f3", "F", "F-1", "F 3", " F3", "F3\n", "F3c", "F3c1c2", "F3,", "F3 B3"]
    + ["F3|", "|EF3", "F3|EF2|EF1", "EF2e", "EF2.1e1", "EF2ee1"]
    + ["EF2.", "EF2.+1", "EF2.1+", "EF2[0:4]", "EF2[0:)", "EF2(0:4)", "EF2[0:4).1", "BF2"],
)
def test_other_text_is_no_task(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not a task; tasks look like F3"):
        Task.parse(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("EF3c1", "encoder tasks have no chunk"),
        ("EB0c0", "encoder tasks have no chunk"),
        ("F3.1", "only encoder tasks have units and layers"),
        ("B3[0:2)", "only encoder tasks have units and layers"),
        ("F3e1", "only encoder tasks have units and layers"),
        ("EF3e0", "is not how a task is written, 'EF3' is"),
        ("F3|EB2.0", "only an EF goes into an F, and only an EB into a B"),
        ("B3|EF2.0", "only an EF goes into an F, and only an EB into a B"),
        ("EF3|EF2.0", "only an EF goes into an F"),
        ("F3|F2", "only an EF goes into an F"),
        ("F3|EF2.0+1", "one unit goes into an LLM task"),
    ],
)
def test_parts_of_the_other_kind_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        Task.parse(text)


def test_schedule_text_may_be_indented_and_spaced() -> None:
    pipe = Pipeline(2, 1)
    text = """
        0: EF0  F0 B0 EB0

        1 :F0 B0
    """
    assert str(Schedule.parse(text, pipe)) == "0: EF0 F0 B0 EB0\n1: F0 B0"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0: F0 B0\n2: F0 B0", "expected '1: tasks ...', got '2: F0 B0'"),
        ("0: F0 B0\n0: F0 B0", "expected '1: tasks ...', got '0: F0 B0'"),
        ("F0 B0", "expected '0: tasks ...', got 'F0 B0'"),
        ("0: F0, B0", "'F0,' is not a task"),
    ],
)
def test_schedule_text_that_does_not_fit_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        Schedule.parse(text, Pipeline(2, 1))


def test_encoded_are_the_microbatches_with_encoder_forwards() -> None:
    schedule = Schedule.parse("0: EF2 F0 F1 F2 B0\n1: EF0.1 F0 B0 EB1", Pipeline(2, 3))
    assert schedule.encoded == {0, 2}


def test_pipeline_fills_in_what_is_left_out() -> None:
    pipe = Pipeline(4, 8, chunks=2)
    assert (pipe.virtual_stages, pipe.encoders, pipe.llm_layers) == (
        *(8, (EncoderPipeline((1,), 4),), (1,) * 8),
    )
    assert (pipe.first_stage, pipe.entry, pipe.cap) == (0, 0, 0)
    assert pipe.units_of(Task(Kind.EF, 0)) == (0, 1, 2, 3)
    assert pipe.units_of(Task(Kind.EF, 0, units=(2,))) == (2,)
    assert Pipeline(4, 8, encoders=(EncoderPipeline((6,)),)).layers_of(Task(Kind.EB, 0), 3) == (
        0,
        6,
    )
    assert pipe.layers_of(Task(Kind.EB, 0, layers=(2, 3)), 0) == (2, 3)


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (1, 1, 0), (2, -1)])
def test_sizes_of_a_pipeline_are_positive(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ScheduleError, match="must be positive"):
        Pipeline(*sizes)
    with pytest.raises(ScheduleError, match="must be positive"):
        Pipeline(1, 1, encoders=(EncoderPipeline((0,)),))


def test_layer_counts_must_fit_the_virtual_stages() -> None:
    with pytest.raises(ScheduleError, match=r"3 layer counts for 4 virtual stages \(2 stages x 2"):
        Pipeline(2, 2, chunks=2, llm_layers=(1, 1, 1))
    assert Pipeline(2, 2, chunks=2, llm_layers=(1, 2, 3, 4)).llm_layers == (1, 2, 3, 4)


def test_parts_of_tasks() -> None:
    both, inside = Task.parse("F3c1|EF5.1"), Task.parse("EF5.1")
    assert (both.llm_part, both.encoder_part) == (Task(Kind.F, 3, 1), inside)
    assert (inside.llm_part, inside.encoder_part) == (None, inside)
    assert Task.parse("B1").encoder_part is None
    assert Schedule.parse("0: F0|EF2.0 EF1e1", Pipeline(1, 3)).encoded == {1, 2}


def test_sizes_of_encoders() -> None:
    two, one = EncoderPipeline((2, 3)), EncoderPipeline((4,), units=3)
    assert (two.stages, two.total, two.last) == (2, 5, 1)
    assert [two.first_layer(stage) for stage in (0, 1)] == [0, 2]
    assert EncoderPipeline((3, 1, 0, 0)).last == 1
    pipe = Pipeline(4, 2, encoders=(two, one), cap=3)
    assert [encoder.units for encoder in pipe.encoders] == [2, 3]
    assert [pipe.pipelines(k) for k in (0, 1)] == [2, 4]
    assert [list(pipe.devices_of(0, j)) for j in (0, 1)] == [[0, 1], [2, 3]]
    assert [pipe.pipeline_of(0, d) for d in range(4)] == [0, 0, 1, 1]
    assert [pipe.stage_layers(0, d) for d in range(4)] == [(0, 2), (2, 5)] * 2
    assert pipe.layers_of(Task(Kind.EF, 0), 3) == (2, 5)
    assert pipe.layers_of(Task(Kind.EF, 0, encoder=1), 3) == (0, 4)
    # 3 microbatches of 2 units over 2 pipelines, and of 3 units over 4 pipelines
    assert [pipe.units_cap(k) for k in (0, 1)] == [3, 3]
    assert Pipeline(2, 1).units_cap(0) is None


@pytest.mark.parametrize("layers", [(), (0,), (1, 0, 1), (0, 1), (1, -1)])
def test_only_the_last_stages_of_an_encoder_may_be_empty(layers: tuple[int, ...]) -> None:
    with pytest.raises(ScheduleError, match="only its last stages may have no layers"):
        EncoderPipeline(layers)


def test_the_stages_of_an_encoder_divide_those_of_the_llm() -> None:
    with pytest.raises(ScheduleError, match=r"encoder 1 has 3 stages, .* LLM's 4; 1, 2, 4 would"):
        Pipeline(4, 1, encoders=(EncoderPipeline(), EncoderPipeline((1, 1, 1))))


def test_the_llm_may_begin_later() -> None:
    pipe = Pipeline(2, 1, chunks=2, llm_layers=(0, 0, 0, 2))
    assert (pipe.first_stage, pipe.entry) == (3, 1)
    assert [pipe.runs(d, c) for d, c in ((0, 1), (1, 0), (1, 1))] == [False, False, True]
    with pytest.raises(ScheduleError, match="the LLM has no layers"):
        Pipeline(2, 1, llm_layers=(0, 0))
