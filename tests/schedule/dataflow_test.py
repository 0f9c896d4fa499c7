"""What tasks read and write, and which flows of values are refused."""

from __future__ import annotations

import pytest

from optimus_jax.schedule.dataflow import Content, Dataflow, Value, reads_and_writes
from optimus_jax.schedule.task import EncoderPipeline, Pipeline, Schedule, ScheduleError, Task

FULL = "0: EF0 F0 B0 EB0\n1: F0 B0"

INTERLEAVED = Pipeline(2, 2, chunks=2, encoders=(EncoderPipeline((4,)),))

# task, device: what it reads -> what it writes; microbatch 0 is encoded, microbatch 1 is not
FLOWS = {
    ("F0", 0): "feature 0.0, feature 0.1 -> activation 0 stage 1",
    ("F0", 1): "activation 0 stage 1 -> activation 0 stage 2",
    ("F0c1", 0): "activation 0 stage 2 -> activation 0 stage 3",
    ("F0c1", 1): "activation 0 stage 3 -> gradient 0 stage 3",
    ("B0c1", 1): "gradient 0 stage 3 -> gradient 0 stage 2",
    ("B0c1", 0): "gradient 0 stage 2 -> gradient 0 stage 1",
    ("B0", 1): "gradient 0 stage 1 -> gradient 0 stage 0",
    ("B0", 0): "gradient 0 stage 0 -> feature gradient 0.0, feature gradient 0.1",
    ("F1", 0): " -> activation 1 stage 1",
    ("B1", 0): "gradient 1 stage 0 -> ",
    ("EF0", 0): " -> feature 0.0, feature 0.1",
    ("EF0.1", 0): " -> feature 0.1",
    ("EF0.1[0:2)", 1): " -> hidden 0.1 layer 2",
    ("EF0.1[2:3)", 1): "hidden 0.1 layer 2 -> hidden 0.1 layer 3",
    ("EF0.1[2:4)", 1): "hidden 0.1 layer 2 -> feature 0.1",
    ("EB0.0", 0): "feature gradient 0.0 -> ",
    ("EB0.1[2:4)", 1): "feature gradient 0.1 -> hidden gradient 0.1 layer 2",
    ("EB0.1[1:2)", 1): "hidden gradient 0.1 layer 2 -> hidden gradient 0.1 layer 1",
    ("EB0.1[0:2)", 1): "hidden gradient 0.1 layer 2 -> ",
}


def _short(value: Value) -> str:
    """`feature 0.1` is of microbatch 0 and unit 1."""
    if value.is_feature or value.is_hidden:
        layer = f" layer {value.layer}" if value.is_hidden else ""
        return f"{value.content} {value.microbatch}.{value.place}{layer}"
    return f"{value.content} {value.microbatch} stage {value.place}"


@pytest.mark.parametrize(("case", "flow"), FLOWS.items(), ids=str)
def test_each_task_reads_and_writes(case: tuple[str, int], flow: str) -> None:
    task, device = case
    reads, writes = reads_and_writes(Task.parse(task), device, INTERLEAVED, frozenset({0}))
    assert f"{', '.join(map(_short, reads))} -> {', '.join(map(_short, writes))}" == flow


def test_values_print_in_words() -> None:
    assert str(Value(Content.FEATURE_GRADIENT, 3, 1)) == "feature gradient of microbatch 3 unit 1"
    assert str(Value(Content.HIDDEN, 0, 1, 2)) == "hidden of microbatch 0 unit 1 layer 2"
    assert str(Value(Content.GRADIENT, 2, 5)) == "gradient of microbatch 2 stage 5"


def test_one_stage_hands_the_loss_gradient_to_itself() -> None:
    flow = Dataflow.of(Schedule.parse("0: EF0 F0 B0 EB0", Pipeline(1, 1)))
    gradient = Value(Content.GRADIENT, 0, 0)
    assert flow.producer[gradient] == (0, Task.parse("F0"))
    assert flow.consumer[gradient] == (0, Task.parse("B0"))
    assert not any(map(flow.moves, flow.producer))


def test_values_move_between_devices_only() -> None:
    text = "0: EF0.0 F0 B0 EB0.0\n1: EF0.1 F0 B0 EB0.1"
    flow = Dataflow.of(Schedule.parse(text, Pipeline(2, 1)))
    assert sorted(_short(v) for v in flow.producer if flow.moves(v)) == [
        "activation 0 stage 1",
        "feature 0.1",
        "feature gradient 0.1",
        "gradient 0 stage 0",
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("0: F0 B0 EB0\n1: F0 B0", "EB0 on device 0 reads feature gradient .* nothing makes it"),
        ("0: EF0.1 F0 B0\n1: F0 B0", "F0 on device 0 reads feature of .* unit 0: nothing makes it"),
        ("0: EF0 F0\n1: B0", "B0 on device 1 reads gradient .* stage 1: nothing makes it"),
        ("0: EF0 F0 B0\n1: EF0.1 F0 B0", "made twice: by EF0 on device 0 and by EF0.1 on device 1"),
        ("0: F0 F0 B0\n1: F0 B0", "made twice: by F0 on device 0 and by F0 on device 0"),
        (f"{FULL} EB0.1", "read twice: by EB0 on device 0 and by EB0.1 on device 1"),
    ],
)
def test_unsound_flows_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        Dataflow.of(Schedule.parse(text, Pipeline(2, 1)))


def test_an_encoder_unit_stays_on_its_device() -> None:
    text = "0: EF0[1:2) F0 B0 EB0\n1: EF0[0:1) F0 B0"
    with pytest.raises(
        ScheduleError, match=r"EF0\[1:2\) on device 0 continues EF0\[0:1\) of device 1.*stays"
    ):
        Dataflow.of(Schedule.parse(text, Pipeline(2, 1, encoders=(EncoderPipeline((2,)),))))


def test_removing_undoes_adding() -> None:
    schedule = Schedule.parse(FULL, Pipeline(2, 1))
    flow = Dataflow.of(schedule)
    before = dict(flow.io), dict(flow.producer), dict(flow.consumer)
    task = Task.parse("EF0")
    flow.remove(0, task)
    with pytest.raises(ScheduleError, match="F0 on device 0 reads feature"):
        flow.check()
    flow.add(0, task)
    assert (flow.io, flow.producer, flow.consumer) == before
