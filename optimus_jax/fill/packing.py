"""Packing: encoder work of one direction put into windows, microbatch by microbatch.

Forwards are packed from their deadlines F_i back in time, backwards from their releases B_i on. In
negated time a forward pipeline drains from its last stage to its first, as a backward does, so both
are the same list scheduling: last encoder stage first, each kernel at the earliest place.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from optimus_jax.fill.backbone import Backbone, Interval
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


@dataclasses.dataclass(frozen=True, eq=False)
class Placed:
    """The work of one encoder; `backward` is None if it is frozen. Then it may have been packed so
    that its forward `crosses` from the step before."""

    plan: EncoderPlan
    forward: Packed
    backward: Packed | None
    crosses: bool = False

    @property
    def directions(self) -> Iterator[tuple[str, Packed]]:
        yield "EF", self.forward
        if self.backward is not None:
            yield "EB", self.backward


Free = Sequence[Sequence[Sequence[Interval]]]  # by pipeline and stage, what others left


def slices(plans: Sequence[EncoderPlan]) -> int:
    """Parts of a rank's devices that all encoders' copies are made of."""
    return math.lcm(*(plan.copies for plan in plans))


class Taken:
    """What is taken of the time of every device of an LLM pipeline. A rank's devices are `slices`
    of its tensor-parallel group; an encoder pipeline with c copies takes 1 / c of them.

    Work that crosses steps lies in the LLM's own steps. It is taken as it recurs in each: what runs
    before the step's start for this step runs before its end for the next. Other work may lie
    outside the LLM's step, where delay and tail put steps further apart, and crossing work never.
    """

    def __init__(self, backbone: Backbone, slices: int):
        self.slices = slices
        self.low, self.high = backbone.frame
        self._spans: list[list[list[Span]]] = [
            [[] for _ in range(slices)] for _ in range(backbone.ranks)
        ]

    def add(self, plan: EncoderPlan, packed: Packed, crosses: bool = False) -> None:
        """Takes the spans of a packing. Raises ValueError if the copies do not divide `slices`."""
        for part in packed.parts:
            for stage, span in enumerate(part.spans):
                spans = self._recurring(span) if crosses else [span]
                for mine in self._of(plan, part.pipeline, stage):
                    mine += spans

    def free(self, plan: EncoderPlan, crosses: bool = False) -> Free:
        """By pipeline and stage, when all its devices are free; for work that crosses steps, in the
        step before as well."""

        def spans(pipeline: int, stage: int) -> list[Span]:
            found = [span for mine in self._of(plan, pipeline, stage) for span in mine]
            if not crosses:
                return found
            period = self.high - self.low
            own = [(max(s, self.low), min(e, self.high)) for s, e in found]
            own = [(s, e) for s, e in own if s < e]
            return [(s - period, e - period) for s, e in own] + own

        return [
            [complement(spans(pipeline, stage)) for stage in range(plan.stages)]
            for pipeline in range(plan.pipelines)
        ]

    def _recurring(self, span: Span) -> list[Span]:
        start, end = span
        period = self.high - self.low
        before = [(start + period, min(end, self.low) + period)] if start < self.low else []
        return before + ([(max(start, self.low), end)] if end > self.low else [])

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
    blocks = _alike(plan, free)
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
                found, pipeline = _soonest(blocks, cursor, i, unit, spans)
            if found is None:
                return None
            for stage, span in zip(reversed(range(plan.stages)), found, strict=True):
                cursor[pipeline][stage] = span[1]
            last = max(last, found[-1][1])
            parts.append(Part(i, pipeline, unit, tuple(reversed(found))))
    return Packed(tuple(parts), last)


def _alike(plan: EncoderPlan, free: Free) -> list[list[int]]:
    """Pipelines that see the same idle time: copies on the same ranks, unless other work has taken
    different time from them."""
    blocks: list[list[int]] = []
    for j in range(plan.pipelines):
        for block in blocks:
            if plan.first(block[0]) == plan.first(j) and free[block[0]] == free[j]:
                block.append(j)
                break
        else:
            blocks.append([j])
    return blocks


def _soonest(
    blocks: Sequence[Sequence[int]],
    cursor: Sequence[Sequence[float]],
    microbatch: int,
    unit: bool,
    spans: Callable[[int, int, bool], list[Span] | None],
) -> tuple[list[Span] | None, int]:
    """The pipeline that is done first. Of those that see the same idle time only the least loaded
    is tried."""
    best: tuple[float, list[Span] | None, int] = (2 * FAR, None, -1)
    for block in blocks:
        j = min(block, key=lambda j: cursor[j][0])
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
