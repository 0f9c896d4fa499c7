"""fine at kernel resolution: the second phase of the paper's bubble scheduler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from optimus_jax.fill.backbone import Backbone
from optimus_jax.fill.coarse import coarse
from optimus_jax.fill.encoder import EncoderPlan
from optimus_jax.fill.filling import Filling
from optimus_jax.fill.packing import Free, Packed, Placed, Taken, slices
from optimus_jax.fill.side import Rooms, Side
from optimus_jax.fill.windows import SlotRule, Windows


def fine(backbone: Backbone, plans: Sequence[EncoderPlan], rule: SlotRule) -> Filling:
    """From `coarse`, the pipeline that sticks out most has one microbatch moved between the LLM's
    passes, into gaps and tensor-parallel slots, until one does not fit; forwards first, then
    backwards (Optimus, section 4.2, OptimizeSchedule). Kernels stay whole: give plans whose work
    is not cut."""
    start = coarse(backbone, plans)
    taken = Taken(backbone, slices(plans))
    placed = []
    for plan, before in zip(plans, start.placed, strict=True):
        rooms, owners = Rooms(backbone, plan, rule), before.forward.owners()
        forward = _optimized(Side(rooms, True), owners, taken.free(plan))
        taken.add(plan, forward)
        backward = None
        if plan.backward is not None:
            backward = _optimized(Side(rooms, False), owners, taken.free(plan))
            taken.add(plan, backward)
        placed.append(Placed(plan, forward, backward))
    return Filling("fine", backbone, rule, tuple(placed))


def _optimized(side: Side, owners: Mapping[int, Sequence[int]], free: Free) -> Packed:
    """One direction after all moves that fit."""
    backbone, moved = side.rooms.backbone, set[int]()

    def room(i: int, rank: int, unit: bool) -> Windows:
        ends = "none" if i in moved else side.outer
        return side.rooms.get(rank, side.forward, unit, ends, i in moved)

    def beyond(packed: Packed) -> dict[int, float]:
        """By pipeline, how far its work sticks out of the LLM's step."""
        found: dict[int, float] = defaultdict(float)
        for part in packed.parts:
            if side.forward:
                out = -backbone.all_gather - part.spans[0][0]
            else:
                out = part.spans[0][1] - backbone.end - backbone.reduce_scatter
            found[part.pipeline] = max(found[part.pipeline], out)
        return found

    best = side.pack(room, free, owners=owners)
    assert best is not None  # open windows hold everything
    out = beyond(best)
    while max(out.values(), default=0.0) > 1e-9:
        critical = max(out, key=lambda j: out[j])
        left = [i for i in side.order if owners[i][0] == critical and i not in moved]
        if not left:
            break
        moved.add(left[0])
        found = side.pack(room, free, owners=owners)
        if found is None or max(beyond(found).values()) > max(out.values()) + 1e-9:
            break
        best, out = found, beyond(found)
    return best
