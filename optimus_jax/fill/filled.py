"""filled at kernel resolution: encoder work packed into every idle interval."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence

from optimus_jax.fill.backbone import Backbone
from optimus_jax.fill.encoder import EncoderPlan
from optimus_jax.fill.filling import Filling, least_step
from optimus_jax.fill.fine import fine
from optimus_jax.fill.packing import Packed, Placed, Taken, slices
from optimus_jax.fill.side import Rooms, Side
from optimus_jax.fill.windows import SlotRule


def filled(
    backbone: Backbone,
    plans: Sequence[EncoderPlan],
    rule: SlotRule,
    spread: bool = True,
    accept: Callable[[Filling], bool] | None = None,
    quick: bool = False,
) -> Filling | None:
    """Forwards packed as late as their deadlines allow and backwards as early as they may start,
    earliest deadline first, into all idle time. The first microbatches' forwards and the last ones'
    backwards, which press most, are spread in units over the pipelines: as few as it takes.

    Late forwards take gaps that backwards may need more, and their pipelines may suit backwards
    badly. So the best numbers of spread microbatches, and none, are also packed with the pipelines
    that suit the backwards and with forwards before the LLM's passes only; last comes `fine`.

    Stops where no packing can be shorter (least_step). `accept` says which packings may be, such
    as those that fit in memory; None if there is no such. `quick` looks at two numbers of spread
    microbatches only, none and half, to compare plans.
    """
    rooms = [Rooms(backbone, plan, rule) for plan in plans]
    count = backbone.microbatches
    most = min(backbone.ranks, count) if spread and any(p.pipelines > 1 for p in plans) else 0
    tries = sorted(
        ((a, b) for a in range(most + 1) for b in range(min(most, count - a) + 1)),
        key=lambda ab: (sum(ab), ab),
    )
    if quick:
        half = min(most, count // 2) // 2
        tries = [(0, 0), (half, half)]
    least = least_step(backbone, list(plans), spread)
    best: Filling | None = None
    best_try = 0, 0

    def shorter(found: Filling) -> bool:
        return (best is None or found.step < best.step - 1e-9) and (not accept or accept(found))

    for first, last in tries:
        found = _attempt(backbone, rooms, _Way(first, last))
        if shorter(found):
            best, best_try = found, (first, last)
            if found.step <= least + 1e-9:
                return best
    if quick:
        return best
    for first, last in dict.fromkeys((best_try, (0, 0))):
        for suits, gaps in ((True, True), (False, False), (True, False)):
            found = _attempt(backbone, rooms, _Way(first, last, suits, gaps))
            if shorter(found):
                best = found
    found = dataclasses.replace(fine(backbone, plans, rule), method="filled")
    return found if shorter(found) else best


@dataclasses.dataclass(frozen=True)
class _Way:
    """With the `first` and the `last` so many microbatches spread. The pipelines are those that
    suit the backwards of the last ones, or with `suits_backward` of all; forwards may use gaps
    between the LLM's passes and its slots, or not."""

    first: int
    last: int
    suits_backward: bool = False
    gaps: bool = True


def _attempt(backbone: Backbone, rooms: Sequence[Rooms], way: _Way) -> Filling:
    """One packing; the open ends before and after the LLM's passes hold everything."""
    taken = Taken(backbone, slices([r.plan for r in rooms]))
    placed = tuple(_one(room, taken, way) for room in rooms)
    return Filling("filled", backbone, rooms[0].rule if rooms else SlotRule(), placed)


def _one(rooms: Rooms, taken: Taken, way: _Way) -> Placed:
    """One encoder's work in what is free, which it takes."""
    plan, free, count = rooms.plan, taken.free(rooms.plan), rooms.backbone.microbatches
    spread = frozenset[int]()
    if plan.pipelines > 1:
        spread = frozenset(range(way.first)) | frozenset(range(count - way.last, count))
    ahead, behind = Side(rooms, True), Side(rooms, False)
    owners = None
    if plan.backward is not None and (way.suits_backward or (way.last and spread)):
        # What presses decides on the pipelines: for the last microbatches the backwards.
        pressing = range(0 if way.suits_backward else count - way.last, count)
        alone = behind.pack(behind.ends("after", True), free, spread)
        assert alone is not None
        owners = {i: p for i, p in alone.owners().items() if i in pressing}
    forward = _crossing(ahead, taken, spread)
    crosses = forward is not None
    if forward is None:
        forward = ahead.pack(ahead.ends("before", way.gaps), free, spread, owners)
        assert forward is not None
    taken.add(plan, forward, crosses)
    backward = None
    if plan.backward is not None:
        ends = behind.ends("after", True)
        backward = behind.pack(ends, taken.free(plan), spread, forward.owners())
        assert backward is not None
        taken.add(plan, backward)
    return Placed(plan, forward, backward, crosses)


def _crossing(side: Side, taken: Taken, spread: frozenset[int]) -> Packed | None:
    """Forwards of a frozen encoder in this step and in the one before, if each pipeline's work then
    fits into the time of one step."""
    plan = side.rooms.plan
    if not plan.crosses_steps:
        return None
    found = side.pack(side.ends("periodic", True), taken.free(plan, crosses=True), spread)
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for part in found.parts if found else ():
        for stage, span in enumerate(part.spans):
            lanes[part.pipeline, stage].append(span)
    lengths = [max(e for _, e in own) - min(s for s, _ in own) for own in lanes.values()]
    fits = max(lengths, default=0.0) <= side.rooms.backbone.step + 1e-9
    return found if fits else None
