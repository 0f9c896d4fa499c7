"""Packing: encoder work of one direction put into windows, microbatch by microbatch.

Forwards are packed from their deadlines F_i back in time, backwards from their releases B_i on. In
negated time a forward pipeline drains from its last stage to its first, as a backward does, so both
are the same list scheduling: last encoder stage first, each kernel at the earliest place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from optimus_jax.fill.backbone import Interval
from optimus_jax.fill.encoder import EncoderPlan, Work
from optimus_jax.fill.windows import FAR, Windows, complement

Span = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Part:
    """A microbatch (or with `unit` one unit of it) on an encoder pipeline: the interval from its
    first to its last kernel in each encoder stage, stage 0 first."""

    microbatch: int
    pipeline: int
    unit: bool
    spans: tuple[Span, ...]


@dataclasses.dataclass(frozen=True)
class Packed:
    """All parts of one direction, in order of time, and the time by which all are done."""

    parts: tuple[Part, ...]
    last: float

    def negated(self) -> Packed:
        parts = [
            dataclasses.replace(p, spans=tuple((-e, -s) for s, e in p.spans)) for p in self.parts
        ]
        return Packed(tuple(reversed(parts)), -self.last)

    def owners(self) -> dict[int, list[int]]:
        """The pipelines of each microbatch: one, or one for each of its units."""
        found: dict[int, list[int]] = {}
        for part in self.parts:
            found.setdefault(part.microbatch, []).append(part.pipeline)
        return found


Free = Sequence[Sequence[Sequence[Interval]]]  # by pipeline and stage, what others left


class Taken:
    """What is taken of the time of every device of an LLM pipeline. A rank's devices are `slices`
    of its tensor-parallel group; an encoder pipeline with c copies takes 1 / c of them. With a
    `period`, what is taken is taken in the step before and after too, so many seconds away."""

    def __init__(self, ranks: int, slices: int, period: float | None = None):
        self.slices = slices
        self.shifts = (0.0,) if period is None else (0.0, -period, period)
        self._spans: list[list[list[Span]]] = [[[] for _ in range(slices)] for _ in range(ranks)]

    def add(self, plan: EncoderPlan, packed: Packed) -> None:
        """Takes the spans of a packing. Raises ValueError if the copies do not divide `slices`."""
        for part in packed.parts:
            for stage, span in enumerate(part.spans):
                for mine in self._of(plan, part.pipeline, stage):
                    mine += [(span[0] + shift, span[1] + shift) for shift in self.shifts]

    def free(self, plan: EncoderPlan) -> Free:
        """By pipeline and stage, when all its devices are free."""
        return [
            [
                complement([s for mine in self._of(plan, pipeline, stage) for s in mine])
                for stage in range(plan.stages)
            ]
            for pipeline in range(plan.pipelines)
        ]

    def _of(self, plan: EncoderPlan, pipeline: int, stage: int) -> list[list[Span]]:
        if self.slices % plan.copies:
            raise ValueError(f"{plan.copies} copies do not divide {self.slices} slices of a rank")
        each, copy = self.slices // plan.copies, pipeline % plan.copies
        return self._spans[plan.first(pipeline) + stage][copy * each : (copy + 1) * each]


def negated_free(free: Free) -> Free:
    """The same with time running backward."""
    return [[[(-e, -s) for s, e in reversed(spans)] for spans in stages] for stages in free]


def pack(
    plan: EncoderPlan,
    work: Work,
    order: Sequence[int],
    release: Sequence[float],
    room: Callable[[int, int, bool], Windows],
    free: Free,
    spread: frozenset[int] = frozenset(),
    owners: Mapping[int, Sequence[int]] | None = None,
) -> Packed | None:
    """Puts the microbatches of `order` one by one, none before its release, each on the pipeline
    that is done with it first, or on its `owners` if it has some; of those in `spread`, unit by
    unit.

    `room(microbatch, rank, unit)` are the windows that a microbatch may use on a rank. Returns None
    if one finds no place.
    """
    cursor = [[-FAR] * plan.stages for _ in range(plan.pipelines)]
    parts: list[Part] = []
    last = -FAR

    def spans(i: int, pipeline: int, unit: bool) -> list[Span] | None:
        counts = work.unit_counts if unit else work.counts
        at, first = release[i], plan.first(pipeline)
        found: list[Span] = []
        for stage in reversed(range(plan.stages)):
            span = _chain(
                room(i, first + stage, unit),
                free[pipeline][stage],
                max(at, cursor[pipeline][stage]),
                counts[stage],
            )
            if span is None:
                return None
            found.append(span)
            at = span[1]
        return found

    for i in order:
        unit = i in spread
        for u in range(plan.pipelines if unit else 1):
            if owners and i in owners:
                pipeline = owners[i][u]
                found = spans(i, pipeline, unit)
            else:
                found, pipeline = _soonest(plan, cursor, i, unit, spans)
            if found is None:
                return None
            for stage, span in zip(reversed(range(plan.stages)), found, strict=True):
                cursor[pipeline][stage] = span[1]
            last = max(last, found[-1][1])
            parts.append(Part(i, pipeline, unit, tuple(reversed(found))))
    return Packed(tuple(parts), last)


def _soonest(
    plan: EncoderPlan,
    cursor: Sequence[Sequence[float]],
    microbatch: int,
    unit: bool,
    spans: Callable[[int, int, bool], list[Span] | None],
) -> tuple[list[Span] | None, int]:
    """The pipeline that is done first. Of copies on the same ranks only the least loaded is tried:
    they see the same windows."""
    best: tuple[float, list[Span] | None, int] = (2 * FAR, None, -1)
    for block in range(0, plan.pipelines, plan.copies):
        j = min(range(block, block + plan.copies), key=lambda j: cursor[j][0])
        found = spans(microbatch, j, unit)
        if found is not None and found[-1][1] < best[0] - 1e-12:
            best = found[-1][1], found, j
    return best[1], best[2]


def _chain(windows: Windows, free: Sequence[Interval], at: float, count: int) -> Span | None:
    """First start and last end of `count` kernels one after the other, from `at` on, in what is
    free of the windows."""
    begun, left = None, count
    for start, end in free:
        if end <= at:
            continue
        first, last, remaining = windows.place(max(start, at), end, left)
        if remaining < left and begun is None:
            begun = first
        left = remaining
        if not left:
            return (begun if begun is not None else first), last
    return None
