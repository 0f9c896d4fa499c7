"""Pieces: encoder work with the window and the kernels of each piece of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from optimus_jax.fill.backbone import Backbone, Interval
from optimus_jax.fill.packing import Part, Placed, Taken, slices
from optimus_jax.fill.side import Rooms
from optimus_jax.fill.windows import SlotRule


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


def pieces_of(backbone: Backbone, rule: SlotRule, placed: Sequence[Placed]) -> Iterator[Piece]:
    """All pieces of encoders that were placed one after the other, part by part, in the order in
    which they were packed."""
    taken = Taken(backbone, slices([one.plan for one in placed]))
    for encoder, one in enumerate(placed):
        rooms = Rooms(backbone, one.plan, rule)
        for kind, packed in one.directions:
            free = taken.free(one.plan, kind == "EF" and one.crosses)
            for part in packed.parts:
                for stage in range(one.plan.stages):
                    idle = free[part.pipeline][stage]
                    yield from _replayed(rooms, one, encoder, kind, part, stage, idle)
            taken.add(one.plan, packed, kind == "EF" and one.crosses)


def _replayed(
    rooms: Rooms,
    one: Placed,
    encoder: int,
    kind: str,
    part: Part,
    stage: int,
    free: Sequence[Interval],
) -> list[Piece]:
    """The kernels of a part in a stage put into its windows again, from the side it was packed."""
    forward = kind == "EF"
    work = one.plan.forward if forward else one.plan.backward
    assert work is not None
    left = (work.unit_counts if part.unit else work.counts)[stage]
    rank = one.plan.first(part.pipeline) + stage
    ends = "periodic" if forward and one.crosses else "both"
    windows = rooms.get(rank, forward, part.unit, ends, True)
    begin, until = part.spans[stage]
    if forward:
        begin, until = -until, -begin
        free = [(-e, -s) for s, e in reversed(free)]
    found = []
    for a, b in free:
        if b <= begin or a >= until or not left:
            continue
        for start, end, kernels, slot in windows.runs(max(a, begin), b, left):
            left -= kernels
            start, end = (-end, -start) if forward else (start, end)
            found.append(Piece(encoder, kind, part, stage, start, end, kernels, slot))
    return found[::-1] if forward else found
