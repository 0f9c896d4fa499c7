"""The trace for chrome://tracing and Perfetto."""

from __future__ import annotations

import itertools
import json
import pathlib
from collections import Counter
from typing import Any

import pytest

from optimus_jax.timeline import chrome
from tests.timeline import ranks


def values() -> dict[str, Any]:
    third = 1 / 3  # ends that no decimal number equals: rounding must not make slices overlap
    tasks = [
        {"name": f"F{k}", "kind": "F", "start": k * third / 7, "end": (k + 1) * third / 7}
        for k in range(7)
    ]
    tasks.append({"name": "EB0.1", "kind": "EB", "start": third, "end": 2 * third})
    device = {
        "tasks": tasks,
        "exchanges": [
            {
                "start": 0.1,
                "end": 0.1,
                "with": 1,
                "features": True,
                "what": ["features of microbatch 0 unit 1", "more"],
            }
        ],
        "idle": [
            {
                "start": 2 * third,
                "end": 0.9,
                "cause": "pp_cooldown",
                "waits_for": "B0 on device 1",
            },
            {"start": 0.0, "end": 0.0, "cause": "pp_warmup", "waits_for": None},
        ],
    }
    view = {"end_s": 1.0, "epilogue_s": [0.9, 1.0], "devices": [device, device]}
    filled = {"name": "filled", "views": {"predicted": view, "measured": view}}
    phased = {"name": "phased", "views": {"predicted": view}}
    about = {"title": "a run", "notes": ["small print"], "emulated": True}
    return {**about, "methods": [filled, phased]}


@pytest.fixture
def trace(tmp_path: pathlib.Path) -> dict[str, Any]:
    chrome.write(values(), tmp_path / "trace.json")
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]
    return json.loads((tmp_path / "trace.json").read_text())


def slices(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_events_have_what_viewers_need(trace: dict[str, Any]) -> None:
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X"}
    for event in trace["traceEvents"]:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert isinstance(event["name"], str) and isinstance(event["args"], dict)
    for event in slices(trace):
        assert event["ts"] >= 0 and event["dur"] >= 0
        assert event["cat"]
    assert trace["otherData"] == {"title": "a run", "notes": ["small print"], "emulated": True}


def test_every_task_is_there_once_in_each_view_and_device(trace: dict[str, Any]) -> None:
    names = [
        task["name"] for task in values()["methods"][0]["views"]["predicted"]["devices"][0]["tasks"]
    ]
    for pid in (1, 2, 3):
        for tid in (1, 4):
            here = Counter(e["name"] for e in slices(trace) if (e["pid"], e["tid"]) == (pid, tid))
            assert here == Counter([*names, chrome.EPILOGUE])


def test_processes_and_threads_are_named(trace: dict[str, Any]) -> None:
    named = [e for e in trace["traceEvents"] if e["name"] in ("process_name", "thread_name")]
    processes = {e["pid"]: e["args"]["name"] for e in named if e["name"] == "process_name"}
    assert processes == {1: "filled, predicted", 2: "filled, measured", 3: "phased, predicted"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in named if e["name"] == "thread_name"}
    assert threads[1, 1] == "device 0 tasks"
    assert threads[3, 5] == "device 1 exchanges"
    assert {(e["pid"], e["tid"]) for e in slices(trace)} == threads.keys()


def test_times_are_microseconds_and_slices_of_a_thread_do_not_overlap(
    trace: dict[str, Any],
) -> None:
    mine = sorted(
        (e["ts"], e["ts"] + e["dur"], e["name"])
        for e in slices(trace)
        if (e["pid"], e["tid"]) == (1, 1)
    )
    assert mine[-1] == (900_000.0, 1_000_000.0, chrome.EPILOGUE)
    for (_, end, _), (start, _, _) in itertools.pairwise(mine):
        assert end <= start + 1e-6, "less than the nanosecond that viewers keep"


def test_idle_time_and_exchanges_say_what_they_are(trace: dict[str, Any]) -> None:
    by_thread = {(e["pid"], e["tid"], e["name"]): e["args"] for e in slices(trace)}
    assert by_thread[1, 3, "idle: pipeline cool-down"] == {"waits_for": "B0 on device 1"}
    assert by_thread[1, 3, "idle: pipeline warm-up"] == {"waits_for": "nothing"}
    moved = by_thread[1, 2, "with device 1"]["moves"]
    assert moved == "features of microbatch 0 unit 1, more"


def test_ranks_of_a_cluster_have_threads_for_the_llm_each_slice_and_idle_time() -> None:
    found = chrome.trace(ranks.values())["traceEvents"]
    processes = [e["args"]["name"] for e in found if e["name"] == "process_name"]
    assert processes == ["filled, simulated", "text_only, simulated"]
    named = [e for e in found if e["name"] == "thread_name" and e["pid"] == 1]
    threads = {e["tid"]: e["args"]["name"] for e in named}
    one = ["LLM", "encoder on part 0", "encoder on part 1", "idle"]
    assert list(threads.values()) == [f"rank {d} {what}" for d in (0, 1) for what in one]
    events = [e for e in found if e["ph"] == "X" and e["pid"] == 1]
    by_thread: dict[str, list[tuple[str, float, float]]] = {}
    for e in sorted(events, key=lambda e: e["ts"]):
        row = by_thread.setdefault(threads[e["tid"]], [])
        row.append((e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6))
    assert by_thread["rank 0 LLM"] == [
        ("DP all-gather", 0.0, 0.1),
        ("F0c0", 0.1, 0.5),
        ("B0c0", 0.6, 0.9),
        ("DP reduce-scatter", 0.9, 1.0),
    ]
    slots = ("EF1", 0.15, 0.26)
    gather = "idle: DP all-gather"
    assert by_thread["rank 0 encoder on part 0"] == [(gather, 0.0, 0.1), slots]
    second = by_thread["rank 0 encoder on part 1"]
    assert second == [(gather, 0.0, 0.02), ("EF0.1", 0.02, 0.1), slots]
    assert [name for name, *_ in by_thread["rank 0 idle"]] == [
        "idle: PP between",
        "idle: DP reduce-scatter",
    ]
    about = next(e["args"] for e in events if e["name"] == "EF1")
    assert about == {
        "kernels": 3,
        "pipeline": 0,
        "stage": 1,
        "tensor_parallel_slots": 2,
        "kernels_us": 30_000,
    }
