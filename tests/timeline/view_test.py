"""Views: what a device does when, predicted and from marks of a clock."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from configs.bench import get_config
from optimus_jax.config import from_config_dict
from optimus_jax.cost.costs import emulated
from optimus_jax.plan.plan import Plan, make_plan
from optimus_jax.schedule.lower import lower
from optimus_jax.schedule.methods import METHODS, schedule
from optimus_jax.schedule.program import LLM, Meeting, Payload, Program, Trace, alphabet
from optimus_jax.schedule.simulate import Durations
from optimus_jax.schedule.task import Pipeline, Task
from optimus_jax.timeline import view


def alone(microbatches: int) -> tuple[Program, Durations]:
    """The LLM on two stages, F = 1, B = 2."""
    pipe = Pipeline(2, microbatches)
    durations = Durations.uniform(pipe)
    return lower(schedule("text_only", "1f1b", pipe, durations), durations, bucket=8), durations


def plan_of(method: str, transfers: float = 0.01) -> Plan:
    values = get_config("pp2_m4").to_dict()
    values["emulate"] = {"chunk_forward_s": 1.0, "encoder": 0.75, "encoder_backward": 1.5}
    config = from_config_dict(values)
    costs = dataclasses.replace(emulated(config), exchange=transfers, epilogue=0.5)
    vision = dataclasses.replace(costs.encoders["vision"], feature_exchange=2 * transfers)
    return make_plan(config, dataclasses.replace(costs, encoders={"vision": vision}), method)


def spans(device: dict[str, Any], kind: str) -> list[tuple[float, float]]:
    return [(x["start"], x["end"]) for x in device[kind]]


def test_idle_time_by_hand() -> None:
    program, durations = alone(2)
    found = view.view(program.trace(durations), 9.0, 9.5)
    first, second = found["devices"]
    assert [(t["name"], t["kind"], t["start"], t["end"]) for t in first["tasks"]] == [
        *(("F0", "F", 0, 1), ("F1", "F", 1, 2), ("B0", "B", 4, 6), ("B1", "B", 7, 9)),
    ]
    assert first["idle"] == [
        {"start": 2, "end": 4, "cause": "pp_other", "waits_for": "B0 on device 1"},
        {"start": 6, "end": 7, "cause": "pp_other", "waits_for": "B1 on device 1"},
    ]
    assert second["idle"] == [
        {"start": 0, "end": 1, "cause": "pp_warmup", "waits_for": "F0 on device 0"},
        {"start": 7, "end": 9, "cause": "pp_cooldown", "waits_for": "B1 on device 0"},
    ]
    assert (found["end_s"], found["epilogue_s"]) == (9.5, [9.0, 9.5])
    assert all(x["with"] == 1 and not x["features"] for x in first["exchanges"])
    assert spans(first, "exchanges") == spans(second, "exchanges")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("transfers", [0.0, 0.05])
def test_tasks_exchanges_and_idle_time_tile_each_devices_step(
    method: str, transfers: float
) -> None:
    plan = plan_of(method, transfers)
    found = view.predicted(plan)
    assert (found["end_s"], found["epilogue_s"]) == (plan.step_s, [plan.program_s, plan.step_s])
    for device, lane in zip(found["devices"], plan.lanes, strict=True):
        assert [(t["name"], t["start"], t["end"]) for t in device["tasks"]] == [
            (str(task), start, end) for task, start, end in lane
        ]
        clock = 0.0
        both = [(x, kind) for kind in ("tasks", "exchanges", "idle") for x in device[kind]]
        for x, kind in sorted(both, key=lambda b: (b[0]["start"], b[0]["end"])):
            assert x["start"] == pytest.approx(clock, abs=2e-4 * plan.program_s), (x, kind)
            clock = x["end"]
        assert clock == pytest.approx(plan.program_s, abs=2e-4 * plan.program_s)
        assert all(x["end"] - x["start"] > 1e-4 * plan.program_s for x in device["idle"])
        llm = [(t["start"], t["end"]) for t in device["tasks"] if t["kind"] in ("F", "B")]
        for x in device["idle"]:
            middle = (x["start"] + x["end"]) / 2
            early, late = middle < llm[0][0], middle > llm[-1][1]
            wanted = "pp_warmup" if early else "pp_cooldown" if late else "pp_other"
            assert x["cause"] == wanted
    moved = {x["features"] for d in found["devices"] for x in d["exchanges"]}
    # no features leave their device
    near = method in ("text_only", "encoder_first", "balanced")
    assert moved == ({False} if near else {False, True})


@pytest.mark.parametrize("method", ["phased", "filled"])
def test_who_waits_for_a_task_waits_until_it_is_over(method: str) -> None:
    shown = view.predicted(plan_of(method))
    found, found_end = shown["devices"], shown["epilogue_s"][0]
    waits = [(d, x) for d, device in enumerate(found) for x in device["idle"] if x["waits_for"]]
    assert waits
    for device, x in waits:
        name, _, other = x["waits_for"].rpartition(" on device ")
        assert int(other) == 1 - device
        ends = {t["name"]: t["end"] for t in found[1 - device]["tasks"]}
        assert ends[name] == pytest.approx(x["end"])
        if x["end"] == found_end:  # of all tasks
            assert max(ends.values()) == ends[name]
            continue
        exchanges = found[device]["exchanges"]
        assert any(e["start"] == x["end"] and e["with"] == 1 - device for e in exchanges)


def test_marks_by_hand() -> None:
    """One microbatch: F0, exchange, F0 and B0 on stage 1, exchange, B0."""
    program, _ = alone(1)
    names = [[str(program.task(t, d) or "") for d in (0, 1)] for t in range(program.used_ticks)]
    assert names == [["F0", ""], ["", "F0"], ["", "B0"], ["B0", ""]]
    assert [bool(k) for k in program.pattern[:4]] == [True, False, True, False]
    first = [[0.5, 1.5, 2.0], [2.0, 2.0, 2.0], [2.0, 2.0, 9.0], [9.0, 12.0, 12.0]]
    second = [[1.0, 1.0, 2.25], [2.25, 4.0, 4.0], [4.0, 8.0, 8.5], [8.5, 8.5, 8.5]]
    padding = [[99.0] * 3] * (program.ticks - 4)
    marks = [np.array(rows + padding) for rows in (first, second)]
    found = view.measured(program, marks, 13.0)
    assert (found["end_s"], found["epilogue_s"]) == (13.0, [12.0, 13.0])
    assert [spans(d, "tasks") for d in found["devices"]] == [
        [(0.5, 1.5), (9.0, 12.0)],
        [(2.25, 4.0), (4.0, 8.0)],
    ]
    # an exchange begins when both are there, and is over when both have what they get
    for device in found["devices"]:
        assert spans(device, "exchanges") == [(1.5, 2.25), (8.0, 9.0)]
    assert found["devices"][0]["idle"] == [
        {"start": 0, "end": 0.5, "cause": "pp_warmup", "waits_for": None},
        {"start": 2.25, "end": 8.0, "cause": "pp_other", "waits_for": "B0 on device 1"},
    ]
    assert [(x["start"], x["end"]) for x in found["devices"][1]["idle"]] == [(0, 1.5), (9.0, 12.0)]


@pytest.mark.parametrize("method", ["phased", "filled"])
def test_a_clock_that_reads_predicted_times_gives_the_predicted_view(method: str) -> None:
    plan = plan_of(method, transfers=0.125)
    marks, clock = np.zeros((2, plan.program.ticks, 3)), [0.0, 0.0]
    for tick, index in enumerate(plan.program.pattern):
        for device in (0, 1):
            task = plan.program.task(tick, device)
            marks[device, tick, 0] = clock[device]
            if task is not None:
                clock[device] += plan.durations.of(task, device, plan.program.pipeline)
            marks[device, tick, 1] = clock[device]
        pattern = alphabet(plan.program.pipeline)[index]
        if pattern.links:
            clock = [max(clock) + (0.125 if pattern.payload == LLM else 0.25)] * 2
        marks[:, tick, 2] = clock
    found = view.measured(plan.program, list(marks), plan.step_s)
    assert found == view.predicted(plan)


def test_a_fused_task_names_what_is_inside_and_exchanges_what_they_move() -> None:
    fused, alone = Task.parse("F3|EF5e1.1[0:4)"), Task.parse("EB2e1.0")
    payloads = [Payload("llm"), Payload("feature", 1), Payload("hidden")]
    meetings = [Meeting(k, (0, 1), p, 2.0 + k, 2.5 + k) for k, p in enumerate(payloads)]
    trace = Trace([[(fused, 0.0, 1.5), (alone, 1.5, 2.0)], []], meetings, 5.0)
    found, _ = view.view(trace, 5.0, 6.0)["devices"]
    assert found["tasks"] == [
        {"name": "F3|EF5e1.1[0:4)", "kind": "F", "inside": "EF", "start": 0.0, "end": 1.5},
        {"name": "EB2e1.0", "kind": "EB", "start": 1.5, "end": 2.0},
    ]
    assert [(x["features"], *x["what"]) for x in found["exchanges"]] == [
        (False, "activations, gradients"),
        (True, "features or their gradients of encoder 1"),
        (True, "activations between encoder stages or their gradients"),
    ]


def test_collectives_around_the_tasks_show_with_the_work_beside_them() -> None:
    plan = plan_of("phased")
    costs = dataclasses.replace(plan.costs, gather=1.0, scatter=2.0, overlap=True)
    config = from_config_dict(get_config("pp2_m4").to_dict())
    beside = make_plan(config, costs, "phased")
    assert len(beside.program.prologue) and len(beside.program.epilogue)
    found = view.predicted(beside)
    end = beside.program_s
    assert found["collectives_s"] == {"gather": [0.0, 1.0], "scatter": [end - 2.0, end]}
    first, *_, last = found["devices"][0]["tasks"]
    assert (first["name"], first["start"], first["end"]) == ("EF0", 0.0, pytest.approx(0.75))
    llm = next(t for t in found["devices"][0]["tasks"] if t["kind"] == "F")
    assert llm["start"] >= 1.0, "not before the weights are there"
    assert last["kind"] == "EB" and last["end"] <= end
    assert view.predicted(plan)["collectives_s"] == {}
