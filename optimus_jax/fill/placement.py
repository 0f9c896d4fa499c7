"""Placement: every piece of encoder work with its interval, kernels and window; its check."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from optimus_jax.fill.backbone import Interval
from optimus_jax.fill.coarse import slices
from optimus_jax.fill.filling import Filling
from optimus_jax.fill.packing import Part, Taken
from optimus_jax.fill.windows import intervals_of, negated
from optimus_jax.schedule.task import ScheduleError

_SLACK = 1e-7


@dataclasses.dataclass(frozen=True)
class Piece:
    """`kernels` consecutive kernels of a Part in one window, of the `encoder`-th encoder. `slot`
    says that the window is a tensor-parallel slot of an LLM pass."""

    encoder: int
    kind: str  # "EF" or "EB"
    part: Part
    stage: int
    start: float
    end: float
    kernels: int
    slot: bool


def pieces(filling: Filling) -> Iterator[Piece]:
    """All pieces of a filling, part by part, in the order in which they were packed."""
    backbone = filling.backbone
    period = backbone.step if any(p.crosses for p in filling.placed) else None
    taken = Taken(backbone.ranks, slices([p.plan for p in filling.placed]), period)
    for encoder, placed in enumerate(filling.placed):
        for kind, packed in placed.directions:
            free = taken.free(placed.plan)
            for part in packed.parts:
                for stage in range(placed.plan.stages):
                    idle = free[part.pipeline][stage]
                    yield from _replayed(filling, encoder, kind, part, stage, idle)
            taken.add(placed.plan, packed)


def _replayed(
    filling: Filling, encoder: int, kind: str, part: Part, stage: int, free: Sequence[Interval]
) -> list[Piece]:
    """The kernels of a part in a stage put into its windows again, from the side it was packed."""
    plan, forward = filling.placed[encoder].plan, kind == "EF"
    work = plan.forward if forward else plan.backward
    assert work is not None
    kernel = work.unit if part.unit else work.whole
    left = (work.unit_counts if part.unit else work.counts)[stage]
    begin, end = part.spans[stage]
    windows = idle_intervals(
        filling, plan.first(part.pipeline) + stage, filling.placed[encoder].crosses
    )
    if forward:
        begin, end, windows = -end, -begin, negated(windows)
        free = [(-e, -s) for s, e in reversed(free)]
    found = []
    for start, until, slot in windows:
        if until <= begin or start >= end:
            continue
        each = kernel.compute * filling.rule.contention if slot else kernel.full
        for a, b in free:
            low, high = max(start, begin, a), min(until, b)
            fits = min(left, int((high - low) / each + 1e-6))
            if fits > 0:
                left -= fits
                s, e = low, low + fits * each
                s, e = (-e, -s) if forward else (s, e)
                found.append(Piece(encoder, kind, part, stage, s, e, fits, slot))
    return found[::-1] if forward else found


def idle_intervals(filling: Filling, rank: int, crosses: bool) -> list[tuple[float, float, bool]]:
    """Idle intervals of a rank; for work that may cross steps, those of the step before too."""
    own = intervals_of(filling.backbone, rank, filling.rule)
    if not crosses:
        return own
    backbone, period = filling.backbone, filling.backbone.step
    low, high = -backbone.all_gather, backbone.end + backbone.reduce_scatter
    bounded = [(max(s, low), min(e, high), slot) for s, e, slot in own]
    return [(s - period, e - period, slot) for s, e, slot in bounded] + bounded


def check(filling: Filling) -> None:
    """Raises ScheduleError if work is lost or doubled, two pieces of a device overlap, a piece lies
    outside idle time, or a dependency is broken: stages in order, EF_i before F_i, EB_i after B_i.
    """
    wrong: list[str] = []
    lanes: dict[tuple[int, int], list[Piece]] = defaultdict(list)  # by rank and slice
    counts: dict[tuple[int, str, Part, int], int] = defaultdict(int)
    most = slices([p.plan for p in filling.placed])
    for piece in pieces(filling):
        plan = filling.placed[piece.encoder].plan
        rank = plan.first(piece.part.pipeline) + piece.stage
        each = most // plan.copies
        copy = piece.part.pipeline % plan.copies
        for part in range(copy * each, (copy + 1) * each):
            lanes[rank, part].append(piece)
        counts[piece.encoder, piece.kind, piece.part, piece.stage] += piece.kernels
    for encoder, placed in enumerate(filling.placed):
        for kind, packed in placed.directions:
            wrong += _parts(filling, encoder, kind, packed.parts, counts)
    for (rank, part), found in sorted(lanes.items()):
        found.sort(key=lambda p: p.start)
        for a, b in itertools.pairwise(found):
            if a.end > b.start + _SLACK:
                wrong.append(
                    f"{a.kind}{a.part.microbatch} and {b.kind}{b.part.microbatch} overlap at"
                    f" {b.start:g} s on rank {rank}, part {part} of its devices"
                )
        wrong += _outside(filling, rank, found)
    if wrong:
        raise ScheduleError("\n".join(wrong[:20]))


def _parts(
    filling: Filling,
    encoder: int,
    kind: str,
    parts: Sequence[Part],
    counts: Mapping[tuple[int, str, Part, int], int],
) -> list[str]:
    """What is wrong with one encoder's parts of one direction."""
    plan, backbone, wrong = filling.placed[encoder].plan, filling.backbone, []
    work = plan.forward if kind == "EF" else plan.backward
    assert work is not None
    held: dict[int, list[Part]] = defaultdict(list)
    for part in parts:
        name = f"{kind}{part.microbatch}"
        held[part.microbatch].append(part)
        wanted = work.unit_counts if part.unit else work.counts
        for stage in range(plan.stages):
            placed = counts[encoder, kind, part, stage]
            if placed != wanted[stage]:
                wrong.append(
                    f"{name} has {placed} kernels in stage {stage} of encoder pipeline"
                    f" {part.pipeline}, not {wanted[stage]}"
                )
        spans = part.spans if kind == "EF" else part.spans[::-1]
        for before, after in itertools.pairwise(spans):
            if before[1] > after[0] + _SLACK:
                wrong.append(f"{name}: a stage starts before the one it needs")
        need, given = backbone.need[part.microbatch], backbone.given[part.microbatch]
        if kind == "EF" and spans[-1][1] > need + _SLACK:
            wrong.append(f"{name} ends at {spans[-1][1]:g}, F needs it at {need:g}")
        if kind == "EB" and spans[0][0] < given - _SLACK:
            wrong.append(f"{name} starts at {spans[0][0]:g}, B ends at {given:g}")
    for i in range(backbone.microbatches):
        mine = held.get(i, [])
        if len(mine) != (plan.pipelines if mine and mine[0].unit else 1):
            wrong.append(f"{kind}{i} is there {len(mine)} times")
    return wrong


def _outside(filling: Filling, rank: int, found: Sequence[Piece]) -> list[str]:
    """Pieces, in order of time, that do not lie in an idle interval of their rank."""
    crosses = any(p.crosses for p in filling.placed)
    every = idle_intervals(filling, rank, crosses)
    wrong, k = [], 0
    for piece in found:
        while k < len(every) and every[k][1] < piece.end - _SLACK:
            k += 1
        if k == len(every) or every[k][0] > piece.start + _SLACK:
            wrong.append(
                f"{piece.kind}{piece.part.microbatch} runs on rank {rank} from {piece.start:g} to"
                f" {piece.end:g} s, while the LLM computes"
            )
    return wrong
