"""What each rank of one LLM pipeline does when, as JSON values for the timeline page.

Times are whole microseconds, written as seconds from the begin of the step. A view holds `end_s`;
`llm_s`, when the LLM's own step begins and ends (late by the delay, and before the tail);
`shift_s`, from a Backbone's time to the view's; `slices`, the equal parts of a rank's devices on
which encoder pipelines differ; when the data-parallel `collectives` run; and by rank its `encoder`
work, `idle` intervals and what its time was `spent` on. LLM passes stand apart (`passes` in
answer_views): several methods share them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from optimus_jax.fill.backbone import Backbone, Interval
from optimus_jax.schedule.actions import Action

View = dict[str, Any]

CAUSES = {  # of idle time: in tables, in a sentence
    "encoder_delay": ("delay", "the LLM's step has not begun: encoder forwards come first"),
    "dp_all_gather": ("DP all-gather", "data-parallel all-gather of parameters"),
    "pp_warmup": ("PP warm-up", "pipeline warm-up, before this rank's first LLM pass"),
    "pp_other": ("PP between", "between LLM passes of this rank"),
    "tp": ("TP", "tensor-parallel collectives inside LLM passes"),
    "pp_cooldown": ("PP cool-down", "pipeline cool-down, after this rank's last LLM pass"),
    "dp_reduce_scatter": ("DP reduce-scatter", "data-parallel reduce-scatter of gradients"),
    "encoder_tail": ("tail", "the LLM's step is over: encoder backwards come last"),
}


@dataclasses.dataclass(frozen=True)
class Work:
    """Encoder work on slices `lane` to lane + lanes - 1 of a rank. Its `runs` are one interval, or
    several if it lies in tensor-parallel slots. `inside` says that LLM passes go on meanwhile."""

    kind: str
    runs: tuple[Interval, ...]
    lane: int = 0
    lanes: int = 1
    inside: bool = False
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(end - start for start, end in self.runs)


def micro(seconds: float) -> int:
    return round(1e6 * seconds)


def name(action: Action, ranks: int, chunks: int) -> str:
    """Such as F3c1: microbatch 3 in chunk 1, where a rank has several chunks."""
    chunk = f"c{action.stage // ranks}" if chunks > 1 else ""
    return f"{action.kind}{action.microbatch}{chunk}"


def view(
    backbone: Backbone,
    chunks: int,
    delay: float,
    tail: float,
    count: int,
    rows: Sequence[Sequence[Work]],
    slots: Sequence[float] | None = None,
) -> View:
    """The view of encoder work by rank, on `count` slices. If the encoder's layers lie in the LLM's
    own passes, `slots` are the seconds of collectives in those of each rank."""
    shift = micro(delay + backbone.all_gather)

    def at(seconds: float) -> float:
        return (micro(seconds) + shift) / 1e6

    begin, end = -backbone.all_gather, backbone.end + backbone.reduce_scatter
    makers = _makers(backbone, chunks)
    devices = []
    for rank, works in enumerate(rows):
        row = backbone.passes[rank]
        idle = _idle(row, works, _regions(backbone, rank, delay, tail), count)
        own = sum(e - s for s, e in backbone.slots[rank]) if slots is None else slots[rank]
        spent = dict.fromkeys(("llm", "encoder", "encoder_inside", *CAUSES), 0.0)
        spent["llm"], spent["tp"] = sum(e - s for s, e, _ in row) - own, own
        for work in works:
            seconds = work.seconds * work.lanes / count
            spent["encoder_inside" if work.inside else "encoder"] += seconds
            if work.inside:
                spent["tp" if slots is None else "llm"] -= seconds
        for (start, until, cause), lanes in idle.items():
            spent[cause] += (until - start) * len(lanes) / count
        devices.append(
            {
                "encoder": [_written(work, at, count) for work in works],
                "idle": _idle_entries(idle, at, count, makers[rank]),
                "spent": {key: round(seconds, 9) for key, seconds in spent.items()},
            }
        )
    collectives = (
        ("dp_all_gather", begin, 0.0),
        ("dp_reduce_scatter", backbone.end, end),
    )
    return {
        "end_s": at(end + tail),
        "llm_s": [at(begin), at(end)],
        "collectives": [
            {"cause": cause, "start": at(start), "end": at(until)}
            for cause, start, until in collectives
            if at(until) > at(start)
        ],
        "shift_s": shift / 1e6,
        "slices": count,
        "devices": devices,
    }


def _regions(
    backbone: Backbone, rank: int, delay: float, tail: float
) -> tuple[tuple[str, float, float], ...]:
    """The step by what idle time in it is called, without gaps."""
    row = backbone.passes[rank]
    begin, end = -backbone.all_gather, backbone.end + backbone.reduce_scatter
    return (
        ("encoder_delay", begin - delay, begin),
        ("dp_all_gather", begin, 0.0),
        ("pp_warmup", 0.0, row[0][0]),
        ("pp_other", row[0][0], row[-1][1]),
        ("pp_cooldown", row[-1][1], backbone.end),
        ("dp_reduce_scatter", backbone.end, end),
        ("encoder_tail", end, end + tail),
    )


def _idle_entries(
    idle: Mapping[tuple[float, float, str], Sequence[int]],
    at: Callable[[float], float],
    count: int,
    makers: Mapping[float, str],
) -> list[dict[str, Any]]:
    """Idle intervals of a rank in order of time; those of some slices name them."""
    found = []
    for (start, until, cause), lanes in idle.items():
        if at(until) <= at(start):
            continue
        waits = makers.get(until) if cause in ("pp_warmup", "pp_other") else None
        for lane, many in _runs(lanes):
            entry: dict[str, Any] = {"start": at(start), "end": at(until), "cause": cause}
            entry["waits_for"] = waits
            if many < count:
                entry.update(lane=lane, lanes=many)
            found.append(entry)
    return sorted(found, key=lambda x: (x["start"], x.get("lane", 0)))


def _written(work: Work, at: Callable[[float], float], count: int) -> dict[str, Any]:
    """Encoder work as an entry. `in_slots` are microseconds of runs and of the waits between them
    in turn, the first run first."""
    times = [at(t) for run in work.runs for t in run]
    entry: dict[str, Any] = {
        "kind": work.kind,
        "start": times[0],
        "end": times[-1],
        **work.about,
    }
    if work.inside and "kernels" in work.about:
        entry["in_slots"] = [micro(b - a) for a, b in itertools.pairwise(times)]
    if work.lanes < count:
        entry.update(lane=work.lane, lanes=work.lanes)
    return entry


def _idle(
    row: Sequence[tuple[float, float, object]],
    works: Sequence[Work],
    regions: Sequence[tuple[str, float, float]],
    count: int,
) -> dict[tuple[float, float, str], list[int]]:
    """Intervals in which a rank's slices neither run LLM passes nor encoder work: which slices."""
    found: dict[tuple[float, float, str], list[int]] = defaultdict(list)
    llm = [(start, end) for start, end, _ in row]
    for lane in range(count):
        own = [
            run for work in works if work.lane <= lane < work.lane + work.lanes for run in work.runs
        ]
        clock, k = regions[0][1], 0
        for start, end in [*sorted(llm + own), (regions[-1][2],) * 2]:
            while clock < start and k < len(regions):
                cause, _, until = regions[k]
                if min(start, until) - clock > 1e-9:
                    found[clock, min(start, until), cause].append(lane)
                clock = max(clock, min(start, until))
                if until <= start:
                    k += 1
            clock = max(clock, end)
            while k < len(regions) and regions[k][2] <= clock:
                k += 1
    return found


def _runs(lanes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Neighbouring lanes as first one and number."""
    for _, group in itertools.groupby(enumerate(lanes), lambda one: one[1] - one[0]):
        run = [lane for _, lane in group]
        yield run[0], len(run)


def _makers(backbone: Backbone, chunks: int) -> list[dict[float, str]]:
    """By rank and start of a pass, what makes its input, such as "F3c1 on rank 2"."""
    home = {action: rank for rank, row in enumerate(backbone.passes) for _, _, action in row}
    found: list[dict[float, str]] = [{} for _ in backbone.passes]
    for rank, row in enumerate(backbone.passes):
        for start, _, action in row:
            assert isinstance(action, Action)
            stage = action.stage + (-1 if action.kind == "F" else 1)
            for kind in "F" if action.kind == "F" else "BI":
                maker = Action(stage, kind, action.microbatch)
                if maker in home and home[maker] != rank:
                    words = name(maker, backbone.ranks, chunks)
                    found[rank][start] = f"{words} on rank {home[maker]}"
    return found
