"""The same timelines as a trace that chrome://tracing and Perfetto open."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

from optimus_jax.files import replace_text
from optimus_jax.schedule.bubbles import CAUSE_WORDS
from optimus_jax.schedule.task import Kind

# Slices of one thread must not overlap unless one contains the other, hence a thread for each.
ROWS = ("tasks", "exchanges", "idle")
EPILOGUE = "gradient reduction and optimiser"

Event = dict[str, Any]


def write(values: dict[str, Any], path: pathlib.Path) -> None:
    """Writes the trace of `values` whole or not at all."""
    replace_text(path, json.dumps(trace(values), allow_nan=False))


def trace(values: dict[str, Any]) -> dict[str, Any]:
    """A process for each method and view, with three threads for each device."""
    events: list[Event] = []
    views = [(m, name, view) for m in values["methods"] for name, view in m["views"].items()]
    for pid, (method, name, view) in enumerate(views, start=1):
        events += _metadata(pid, f"{method['name']}, {name}", len(view["devices"]))
        for device, row in enumerate(view["devices"]):
            for tid, slices in enumerate(_slices(row, view), start=device * len(ROWS) + 1):
                events += ({**event, "pid": pid, "tid": tid} for event in slices)
    about = {key: values[key] for key in ("title", "notes", "emulated")}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _metadata(pid: int, process: str, devices: int) -> Iterator[Event]:
    yield _named(pid, "process_name", name=process)
    yield _named(pid, "process_sort_index", sort_index=pid)
    names = (f"device {d} {row}" for d in range(devices) for row in ROWS)
    for tid, name in enumerate(names, start=1):
        yield _named(pid, "thread_name", tid, name=name)
        yield _named(pid, "thread_sort_index", tid, sort_index=tid)


def _named(pid: int, what: str, tid: int = 0, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _slices(row: dict[str, Any], view: dict[str, Any]) -> tuple[list[Event], ...]:
    """Tasks, exchanges and idle intervals of one device, in the order of ROWS."""
    start, end = view["epilogue_s"]
    tasks = [_slice(t["name"], Kind(t["kind"]).words, t["start"], t["end"]) for t in row["tasks"]]
    return (
        [*tasks, _slice(EPILOGUE, "epilogue", start, end)],
        [
            _slice(
                f"with device {x['with']}",
                "encoder features" if x["features"] else "activations and gradients",
                x["start"],
                x["end"],
                moves=", ".join(x["what"]),
            )
            for x in row["exchanges"]
        ],
        [
            _slice(
                f"idle: {CAUSE_WORDS[x['cause']]}",
                "idle",
                x["start"],
                x["end"],
                waits_for=x["waits_for"] or "nothing",
            )
            for x in row["idle"]
        ],
    )


def _slice(name: str, category: str, start: float, end: float, **args: str) -> Event:
    """A complete event. Both ends are rounded to nanoseconds before they are subtracted: neighbours
    that touch must not overlap, or viewers misplace them."""
    first, last = round(start * 1e9), round(end * 1e9)
    dur = max(0, last - first) / 1000
    return {"ph": "X", "name": name, "cat": category, "ts": first / 1000, "dur": dur, "args": args}
