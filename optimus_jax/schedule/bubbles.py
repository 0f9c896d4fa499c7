"""Idle time by cause, and how much of it encoder work fills."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from optimus_jax.schedule.simulate import Durations
from optimus_jax.schedule.task import Kind, Pipeline, Task

Lane = Sequence[tuple[Task, float, float]]  # tasks of one device with start and end, in seconds

CAUSE_WORDS = {
    "pp_warmup": "pipeline warm-up",
    "pp_other": "between LLM tasks",
    "pp_cooldown": "pipeline cool-down",
}
CAUSES = tuple(CAUSE_WORDS)
# of plans with collectives that encoder tasks run beside
COLLECTIVE_WORDS = {
    "dp_gather": "gathering weights",
    "dp_scatter": "scattering gradients",
    "tp": "collectives in LLM tasks",
}
CAUSE_WORDS |= COLLECTIVE_WORDS


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
    """Bubbles by cause: before a device's first LLM task, between LLM tasks, after its last one;
    and where there are such, beside the collectives over replicas before and after all tasks, and
    inside LLM tasks, where a device waits for collectives of its tensor shards.

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


def bubble_report(
    lanes: Sequence[Lane],
    alone: Sequence[Lane],
    plan: tuple[Durations, Pipeline] | None = None,
    ends: tuple[float, float] | None = None,
) -> BubbleReport:
    """From the timeline of a method and that of the LLM alone, device by device.

    `plan` is what the method's times are made of: without it nothing is known of collectives.
    `ends` are the ends of both, if not those of their last tasks.
    """
    step, alone_step = ends or (_end(lanes), _end(alone))
    around = (plan[0].gather, plan[0].scatter) if plan else (0.0, 0.0)
    causes = {}
    for cause in (*_bounds([], 0.0, around), *(("tp",) if plan and any(plan[0].window) else ())):
        totals = [0.0] * 4
        for device, (lane, own) in enumerate(zip(lanes, alone, strict=True)):
            if cause == "tp":
                assert plan
                found = _inside(device, lane, *plan)
            else:
                idle, _ = _regions(own, alone_step, around)[cause]
                left, encoder = _regions(lane, step, around)[cause]
                found = (idle, encoder, min(encoder, idle), left)
            totals = [a + b for a, b in zip(totals, found, strict=True)]
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


def _bounds(lane: Lane, step: float, around: tuple[float, float]) -> dict[str, tuple[float, float]]:
    """By cause, from when to when idle time has it on one device. `around` are the seconds of the
    collectives before and after all tasks."""
    gather, scatter = around
    llm = [(start, end) for task, start, end in lane if not task.kind.is_encoder]
    first, last = (llm[0][0], llm[-1][1]) if llm else (step, step)
    begin, end = min(gather, first), max(step - scatter, last)
    found = {
        "pp_warmup": (begin, first),
        "pp_other": (first, last),
        "pp_cooldown": (last, end),
    }
    if gather:
        found["dp_gather"] = (0.0, begin)
    if scatter:
        found["dp_scatter"] = (end, step)
    return found


def _regions(
    lane: Lane, step: float, around: tuple[float, float]
) -> dict[str, tuple[float, float]]:
    """By cause, idle seconds and seconds of encoder work of one device."""
    out = {}
    for cause, (begin, until) in _bounds(lane, step, around).items():
        work = encoder = 0.0
        for task, start, end in lane:
            inside = max(0.0, min(end, until) - max(start, begin))
            work += inside
            encoder += inside * task.kind.is_encoder
        out[cause] = max(0.0, until - begin - work), encoder
    return out


def _inside(
    device: int, lane: Lane, durations: Durations, pipe: Pipeline
) -> tuple[float, float, float, float]:
    """What the LLM tasks of a device wait for their collectives, the encoder work fused with them,
    what of it takes no time, and what still waits."""
    waits = encoder = hidden = 0.0
    for task, start, end in lane:
        if task.kind.is_encoder:
            continue
        layers = pipe.llm_layers[task.chunk * pipe.stages + device]
        waits += layers * durations.window[task.kind == Kind.B]
        if task.inside:
            assert task.llm_part
            own = durations.of(task.inside, device, pipe)
            encoder += own
            hidden += durations.of(task.llm_part, device, pipe) + own - (end - start)
    return waits, encoder, hidden, max(0.0, waits - hidden)


def cause_at(moment: float, lane: Lane) -> str:
    """Why a device is idle at a moment: before, between or after its LLM tasks."""
    llm = [(start, end) for task, start, end in lane if not task.kind.is_encoder]
    if not llm or moment < llm[0][0]:
        return "pp_warmup"
    return "pp_cooldown" if moment > llm[-1][1] else "pp_other"
