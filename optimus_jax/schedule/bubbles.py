"""Idle time by cause, and how much of it encoder work fills."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from optimus_jax.schedule.task import Task

Lane = Sequence[tuple[Task, float, float]]  # tasks of one device with start and end, in seconds

CAUSE_WORDS = {
    "pp_warmup": "pipeline warm-up",
    "pp_other": "between LLM tasks",
    "pp_cooldown": "pipeline cool-down",
}
CAUSES = tuple(CAUSE_WORDS)


@dataclasses.dataclass(frozen=True)
class Bubble:
    """Seconds of one cause, summed over the devices of one pipeline. `alone`: idle when the LLM
    runs alone. `encoder`: encoder work that lies there. `filled`: the part of it that took idle
    time of the LLM alone, the rest lengthens the step. `left`: idle time that remains."""

    alone: float
    encoder: float
    filled: float
    left: float


@dataclasses.dataclass(frozen=True)
class BubbleReport:
    """Bubbles by cause: before a device's first LLM task, between LLM tasks, after its last one.

    `step` and `alone_step` are the seconds of the program with the encoder and of the LLM alone.
    `inside_share` is the share of encoder work inside idle time of the LLM alone; `time_share` says
    how much of the encoder's time per device the step does not get longer by. They differ, since
    work on one device may be hidden while another's is not. Both are 1 without encoder work.
    """

    causes: dict[str, Bubble]
    step: float
    alone_step: float
    inside_share: float
    time_share: float

    @property
    def share_filled(self) -> float:
        """Share of the LLM's own idle time that encoder work takes; 0 if there is none."""
        alone = sum(b.alone for b in self.causes.values())
        return sum(b.filled for b in self.causes.values()) / alone if alone else 0.0


def bubble_report(lanes: Sequence[Lane], alone: Sequence[Lane]) -> BubbleReport:
    """From the timeline of a method and that of the LLM alone, device by device."""
    step, alone_step = _end(lanes), _end(alone)
    causes = {}
    for cause in CAUSES:
        totals = [0.0] * 4
        for lane, own in zip(lanes, alone, strict=True):
            idle, _ = _regions(own, alone_step)[cause]
            left, encoder = _regions(lane, step)[cause]
            for k, value in enumerate((idle, encoder, min(encoder, idle), left)):
                totals[k] += value
        causes[cause] = Bubble(*totals)
    work = sum(b.encoder for b in causes.values())
    filled = sum(b.filled for b in causes.values())
    return BubbleReport(
        causes,
        step,
        alone_step,
        inside_share=filled / work if work else 1.0,
        time_share=1 - (step - alone_step) * len(lanes) / work if work else 1.0,
    )


def _end(lanes: Sequence[Lane]) -> float:
    return max((end for lane in lanes for *_, end in lane), default=0.0)


def _regions(lane: Lane, step: float) -> dict[str, tuple[float, float]]:
    """By cause, idle seconds and seconds of encoder work of one device."""
    llm = [(start, end) for task, start, end in lane if not task.kind.is_encoder]
    first, last = (llm[0][0], llm[-1][1]) if llm else (step, step)
    bounds = {
        "pp_warmup": (0.0, first),
        "pp_other": (first, last),
        "pp_cooldown": (last, step),
    }
    out = {}
    for cause, (begin, until) in bounds.items():
        work = encoder = 0.0
        for task, start, end in lane:
            inside = max(0.0, min(end, until) - max(start, begin))
            work += inside
            encoder += inside * task.kind.is_encoder
        out[cause] = max(0.0, until - begin - work), encoder
    return out


def cause_at(moment: float, lane: Lane) -> str:
    """Why a device is idle at a moment: before, between or after its LLM tasks."""
    llm = [(start, end) for task, start, end in lane if not task.kind.is_encoder]
    if not llm or moment < llm[0][0]:
        return "pp_warmup"
    return "pp_cooldown" if moment > llm[-1][1] else "pp_other"
