"""Placement: the check of where every piece of encoder work lies."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence

from optimus_jax.fill.filling import Filling
from optimus_jax.fill.packing import Part, Placed, Span, slices
from optimus_jax.fill.pieces import Piece
from optimus_jax.fill.windows import intervals_of
from optimus_jax.schedule.task import ScheduleError

_SLACK = 1e-7
Key = tuple[int, str, Part, int]  # encoder, kind, part, stage


def check(filling: Filling) -> None:
    """Raises ScheduleError if work is lost or doubled, two pieces of a device overlap, a piece lies
    outside idle time, or a dependency is broken: stages in order, EF_i before F_i, EB_i after B_i.

    Work that crosses steps is looked at in the step in which it runs: what lies before the step's
    start runs at the end of the step before, beside the other work of that step.
    """
    wrong: list[str] = []
    lanes: dict[tuple[int, int], list[Piece]] = defaultdict(list)  # by rank and slice
    held: dict[Key, list[Piece]] = defaultdict(list)
    most, low = slices([p.plan for p in filling.placed]), filling.backbone.frame[0]
    for piece in filling.pieces:
        held[piece.encoder, piece.kind, piece.part, piece.stage].append(piece)
        plan = filling.placed[piece.encoder].plan
        rank = plan.first(piece.part.pipeline) + piece.stage
        each = most // plan.copies
        copy = piece.part.pipeline % plan.copies
        if filling.placed[piece.encoder].crosses and piece.start < low - _SLACK:
            period = filling.backbone.step
            piece = dataclasses.replace(piece, start=piece.start + period, end=piece.end + period)
        for part in range(copy * each, (copy + 1) * each):
            lanes[rank, part].append(piece)
    for encoder, placed in enumerate(filling.placed):
        for kind, packed in placed.directions:
            wrong += _parts(filling, encoder, kind, packed.parts, held)
        wrong += _owners(placed)
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
    pieces: Mapping[Key, Sequence[Piece]],
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
            found = pieces.get((encoder, kind, part, stage), ())
            placed = sum(piece.kernels for piece in found)
            if placed != wanted[stage]:
                wrong.append(
                    f"{name} has {placed} kernels in stage {stage} of encoder pipeline"
                    f" {part.pipeline}, not {wanted[stage]}"
                )
            elif not _spans(part.spans[stage], found):
                wrong.append(
                    f"{name} lies at {part.spans[stage]} in stage {stage}, its kernels from"
                    f" {found[0].start:g} to {found[-1].end:g} s"
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


def _owners(placed: Placed) -> list[str]:
    """Backwards that do not run where their forward did."""
    if placed.backward is None:
        return []
    begun, ended = placed.forward.owners(), placed.backward.owners()
    return [
        f"EF{i} runs on encoder pipelines {sorted(begun.get(i, []))}, EB{i} on {sorted(own)}"
        for i, own in sorted(ended.items())
        if sorted(own) != sorted(begun.get(i, []))
    ]


def _spans(span: Span, found: Sequence[Piece]) -> bool:
    """Whether pieces in order of time begin and end as a span does."""
    begins, ends = abs(span[0] - found[0].start), abs(span[1] - found[-1].end)
    return max(begins, ends) <= _SLACK


def _outside(filling: Filling, rank: int, found: Sequence[Piece]) -> list[str]:
    """Pieces, in order of time, that do not lie in an idle interval of their rank."""
    every = intervals_of(filling.backbone, rank, filling.rule)
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
