"""What each device does when, as JSON values: tasks, exchanges, and idle time by cause.

A view holds `end_s`, the end of the step; `epilogue_s`, when gradient reduction and optimiser begin
and end; where encoder tasks may run beside them, `collectives_s`, when weights are gathered and
gradients scattered; and for each device its `tasks`, `exchanges` and `idle` intervals. A fused task
names the encoder task `inside`. All in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from optimus_jax.plan.plan import Plan
from optimus_jax.schedule.bubbles import cause_at
from optimus_jax.schedule.methods import MEANINGS
from optimus_jax.schedule.program import Meeting, Payload, Program, Trace, alphabet
from optimus_jax.schedule.task import Task

View = dict[str, Any]
Timed = tuple[Task, float, float]


def predicted(plan: Plan) -> View:
    """The plan's own timeline: simulated, not measured."""
    trace, durations = plan.program.trace(plan.durations), plan.durations
    end = plan.program_s
    spans = {"gather": [0.0, durations.gather], "scatter": [end - durations.scatter, end]}
    spans = {name: span for name, span in spans.items() if span[0] < span[1]}
    return {**view(trace, end, plan.step_s), "collectives_s": spans}


def measured(program: Program, marks: Sequence[np.ndarray], end: float) -> View:
    """The timeline of a step of which every device noted the `marks` [ticks, 3] of its ticks: their
    begin, the end of their task and the end of their exchange. `end` is the step's. Nobody notes
    when tasks before the first tick and after the last one run; they do not show."""
    trace, patterns = Trace([[] for _ in marks], [], end), alphabet(program.pipeline)
    finish = 0.0
    for tick in range(program.used_ticks):
        for device, times in enumerate(marks):
            task = program.task(tick, device)
            if task is not None:
                trace.tasks[device].append((task, float(times[tick, 0]), float(times[tick, 1])))
            finish = max(finish, float(times[tick, 2]))
        pattern = patterns[program.pattern[tick]]
        for a, b in sorted(pattern.links):
            start = max(float(marks[d][tick, 1]) for d in (a, b))
            done = max(float(marks[d][tick, 2]) for d in (a, b))
            trace.meetings.append(Meeting(tick, (a, b), pattern.payload, start, done))
    return view(trace, finish, end)


def of_method(
    name: str,
    plan: Plan,
    measured_s: float | None,
    iqr_s: float | None,
    measured_view: View | None = None,
) -> dict[str, Any]:
    """A method's entry on the page: its steps and its timelines."""
    views = {"predicted": predicted(plan)}
    if measured_view is not None:
        views["measured"] = measured_view
    return {
        "name": name,
        "meaning": MEANINGS.get(name, ""),
        "predicted_s": plan.step_s,
        "measured_s": measured_s,
        "iqr_s": iqr_s,
        "views": views,
    }


def view(trace: Trace, finish: float, end: float) -> View:
    """The view of tasks and exchanges that are over at `finish`, in a step that ends at `end`."""
    return {
        "end_s": end,
        "epilogue_s": [finish, end],
        "collectives_s": {},
        "devices": [_device(d, trace, finish) for d in range(len(trace.tasks))],
    }


def _device(device: int, trace: Trace, finish: float) -> dict[str, Any]:
    tasks = trace.tasks[device]
    meetings = [m for m in trace.meetings if device in m.pair]
    return {
        "tasks": [
            {
                "name": str(task),
                "kind": str(task.kind),
                **({"inside": str(task.inside.kind)} if task.inside else {}),
                "start": start,
                "end": end,
            }
            for task, start, end in tasks
        ],
        "exchanges": [
            {
                "start": m.start,
                "end": m.end,
                "with": _other(m, device),
                "features": m.payload.content != "llm",
                "what": [_what(m.payload)],
            }
            for m in meetings
        ],
        "idle": _idle(device, trace, meetings, finish),
    }


def _what(payload: Payload) -> str:
    """What an exchange moves, in words."""
    words = {
        "llm": "activations, gradients",
        "feature": "features or their gradients",
        "hidden": "activations between encoder stages or their gradients",
    }[payload.content]
    return f"{words} of encoder {payload.encoder}" if payload.encoder else words


def _other(meeting: Meeting, device: int) -> int:
    return meeting.pair[1] if meeting.pair[0] == device else meeting.pair[0]


def _idle(
    device: int, trace: Trace, meetings: list[Meeting], finish: float
) -> list[dict[str, Any]]:
    """Intervals in which a device neither computes nor exchanges, with the task on the other device
    that it waits for, where an exchange ends the interval."""
    tasks = trace.tasks[device]
    busy: list[tuple[float, float, Meeting | None]] = [
        (start, end, None) for _, start, end in tasks
    ]
    busy += [(m.start, m.end, m) for m in meetings]
    shortest = 1e-4 * finish  # what is shorter is not seen
    found, clock = [], 0.0
    ends: list[tuple[float, float, Meeting | None]] = [(finish, finish, None)]
    others = [(end, task, d) for d, row in enumerate(trace.tasks) for task, _, end in row[-1:]]
    _, last_task, last_device = max(others, key=lambda o: o[0]) if others else (0.0, None, device)
    for start, end, meeting in sorted(busy, key=lambda b: b[:2]) + ends:
        if start - clock > shortest:
            awaited = _awaited(device, meeting, trace) if meeting else None
            if start == finish and last_device != device:
                awaited = f"{last_task} on device {last_device}"
            found.append(
                {
                    "start": clock,
                    "end": start,
                    "cause": cause_at((clock + start) / 2, tasks),
                    "waits_for": awaited,
                }
            )
        clock = max(clock, end)
    return found


def _awaited(device: int, meeting: Meeting, trace: Trace) -> str | None:
    """The last task of the other device before a meeting."""
    other = _other(meeting, device)
    before = [task for task, _, end in trace.tasks[other] if end <= meeting.start + 1e-9]
    return f"{before[-1]} on device {other}" if before else None
