"""The same timelines as a trace that chrome://tracing and Perfetto open."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from optimus_jax.files import replace_text
from optimus_jax.schedule.actions import KIND_WORDS
from optimus_jax.schedule.bubbles import CAUSE_WORDS
from optimus_jax.schedule.task import Kind

EPILOGUE = "gradient reduction and optimiser"
COLLECTIVES = {"gather": "gathering weights", "scatter": "scattering gradients"}

Event = dict[str, Any]
Threads = list[tuple[str, list[Event]]]


def write(values: dict[str, Any], path: pathlib.Path) -> None:
    """Writes the trace of `values` whole or not at all."""
    replace_text(path, json.dumps(trace(values), allow_nan=False, separators=(",", ":")))


def trace(values: dict[str, Any]) -> dict[str, Any]:
    """A process for each method and view, with some threads for each device: slices of one thread
    must not overlap unless one contains the other."""
    events: list[Event] = []
    views = [(m, name, view) for m in values["methods"] for name, view in m["views"].items()]
    for pid, (method, name, view) in enumerate(views, start=1):
        threads: Threads = []
        for d, row in enumerate(view["devices"]):
            if "backbone" in view:
                llm = values["backbones"][view["backbone"]]["devices"][d]
                threads += _rank(f"rank {d}", llm, row, view, values["causes"])
            else:
                threads += _device(f"device {d}", row, view)
        events.append(_named(pid, "process_name", name=f"{method['name']}, {name}"))
        events.append(_named(pid, "process_sort_index", sort_index=pid))
        for tid, (thread, slices) in enumerate(threads, start=1):
            events.append(_named(pid, "thread_name", tid, name=thread))
            events.append(_named(pid, "thread_sort_index", tid, sort_index=tid))
            events += ({**event, "pid": pid, "tid": tid} for event in slices)
    about = {key: values[key] for key in ("title", "notes", "emulated")}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _named(pid: int, what: str, tid: int = 0, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _device(name: str, row: dict[str, Any], view: dict[str, Any]) -> Threads:
    """Tasks, exchanges and idle intervals of one device of a run."""
    start, end = view["epilogue_s"]
    tasks = [_slice(t["name"], _words(t), t["start"], t["end"]) for t in row["tasks"]]
    exchanges = [
        _slice(
            f"with device {x['with']}",
            "encoder values" if x["features"] else "activations and gradients",
            x["start"],
            x["end"],
            moves=", ".join(x["what"]),
        )
        for x in row["exchanges"]
    ]
    threads = [
        (f"{name} tasks", [*tasks, _slice(EPILOGUE, "epilogue", start, end)]),
        (f"{name} exchanges", exchanges),
        (f"{name} idle", [_idle(x, CAUSE_WORDS) for x in row["idle"]]),
    ]
    if view.get("collectives_s"):
        both = [
            _slice(COLLECTIVES[which], "collective", *span)
            for which, span in view["collectives_s"].items()
        ]
        threads.insert(1, (f"{name} collectives", both))
    return threads


def _words(task: dict[str, Any]) -> str:
    """A task's kind, in words; of a fused one both."""
    words = Kind(task["kind"]).words
    return f"{words} with {Kind(task['inside']).words} inside" if "inside" in task else words


def _rank(
    name: str,
    llm: list[dict[str, Any]],
    row: dict[str, Any],
    view: dict[str, Any],
    causes: Mapping[str, list[str]],
) -> Threads:
    """LLM passes, encoder work on each slice of its devices, and idle intervals of one rank of a
    cluster. Idle time of some slices stands with their encoder work."""
    shift, count = view["shift_s"], view["slices"]
    words = {cause: both[0] for cause, both in causes.items()}
    passes = [
        _slice(t["name"], f"LLM {KIND_WORDS[t['kind']]}", t["start"] + shift, t["end"] + shift)
        for t in llm
    ]
    passes += [
        _slice(words[x["cause"]], "collective", x["start"], x["end"]) for x in view["collectives"]
    ]
    encoder: list[list[Event]] = [[] for _ in range(count)]
    idle = []
    for work in row["encoder"]:
        event = _encoder(work)
        for lane in _lanes(work, count):
            encoder[lane].append(event)
    for x in row["idle"]:
        event = _idle(x, words)
        if "lane" in x:
            for lane in _lanes(x, count):
                encoder[lane].append(event)
        else:
            idle.append(event)
    part = [f" on part {lane}" if count > 1 else "" for lane in range(count)]
    return [
        (f"{name} LLM", passes),
        *((f"{name} encoder{part[lane]}", encoder[lane]) for lane in range(count)),
        (f"{name} idle", idle),
    ]


def _lanes(entry: dict[str, Any], count: int) -> range:
    lane = entry.get("lane", 0)
    return range(lane, lane + entry.get("lanes", count))


def _encoder(work: dict[str, Any]) -> Event:
    told = ("kernels", "pipeline", "stage", "encoder")
    about: dict[str, Any] = {key: work[key] for key in told if key in work}
    if "in_slots" in work:
        about["tensor_parallel_slots"] = (len(work["in_slots"]) + 1) // 2
        about["kernels_us"] = sum(work["in_slots"][::2])
    return _slice(work["name"], Kind(work["kind"]).words, work["start"], work["end"], **about)


def _idle(x: dict[str, Any], words: Mapping[str, str]) -> Event:
    waits = x["waits_for"] or "nothing"
    name = f"idle: {words[x['cause']]}"
    return _slice(name, "idle", x["start"], x["end"], waits_for=waits)


def _slice(name: str, category: str, start: float, end: float, **args: Any) -> Event:
    """A complete event. Both ends are rounded to nanoseconds before they are subtracted: neighbours
    that touch must not overlap, or viewers misplace them."""
    first, last = round(start * 1e9), round(end * 1e9)
    dur = max(0, last - first) / 1000
    return {"ph": "X", "name": name, "cat": category, "ts": first / 1000, "dur": dur, "args": args}
