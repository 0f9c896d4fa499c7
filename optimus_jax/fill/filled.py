"""filled at kernel resolution: encoder work packed into every idle interval."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from optimus_jax.fill.backbone import Backbone
from optimus_jax.fill.coarse import slices
from optimus_jax.fill.encoder import EncoderPlan
from optimus_jax.fill.filling import Filling, Placed
from optimus_jax.fill.packing import Free, Packed, Taken
from optimus_jax.fill.side import Rooms, Side
from optimus_jax.fill.windows import SlotRule


def filled(
    backbone: Backbone,
    plans: Sequence[EncoderPlan],
    rule: SlotRule,
    spread: bool = True,
    accept: Callable[[Filling], bool] | None = None,
) -> Filling | None:
    """Forwards packed as late as their deadlines allow and backwards as early as they may start,
    earliest deadline first, into all idle time. The first microbatches' forwards and the last ones'
    backwards, which press most, are spread in units over the pipelines: as few as it takes.

    Stops when the step is no longer than the LLM's alone. `accept` says which packings may be, such
    as those that fit in memory; None if there is no such.
    """
    rooms = [Rooms(backbone, plan, rule) for plan in plans]
    count = backbone.microbatches
    most = min(backbone.ranks, count) if spread and any(p.pipelines > 1 for p in plans) else 0
    tries = sorted(
        ((a, b) for a in range(most + 1) for b in range(min(most, count - a) + 1)),
        key=lambda ab: (sum(ab), ab),
    )
    best: Filling | None = None
    for first, last in tries:
        found = _attempt(backbone, rooms, first, last)
        if found is None or (best and found.step >= best.step - 1e-9):
            continue
        if accept is None or accept(found):
            best = found
            if best.step <= backbone.step + 1e-9:
                break
    return best


def _attempt(backbone: Backbone, rooms: Sequence[Rooms], first: int, last: int) -> Filling | None:
    """With the first and the last so many microbatches spread."""
    count = backbone.microbatches
    spread = frozenset(range(first)) | frozenset(range(count - last, count))
    crosses = any(r.plan.crosses_steps for r in rooms)
    period = backbone.step if crosses else None
    taken = Taken(backbone.ranks, slices([r.plan for r in rooms]), period)
    placed = []
    for room in rooms:
        one = _one(room, taken, spread if room.plan.pipelines > 1 else frozenset(), last)
        if one is None:
            return None
        placed.append(one)
    return Filling("filled", backbone, rooms[0].rule if rooms else SlotRule(), tuple(placed))


def _one(rooms: Rooms, taken: Taken, spread: frozenset[int], last: int) -> Placed | None:
    """One encoder's work in what is free, which it takes."""
    plan, free = rooms.plan, taken.free(rooms.plan)
    ahead, behind = Side(rooms, True), Side(rooms, False)
    owners = None
    if plan.backward is not None and last and spread:
        # What presses decides on the pipelines: for the last microbatches the backwards.
        pressing = range(rooms.backbone.microbatches - last, rooms.backbone.microbatches)
        alone = behind.pack(behind.ends("after", True), free, spread)
        owners = {i: p for i, p in alone.owners().items() if i in pressing} if alone else None
    forward, crosses = _forward(ahead, free, spread, owners)
    if forward is None:
        return None
    taken.add(plan, forward)
    backward = None
    if plan.backward is not None:
        backward = behind.pack(
            behind.ends("after", True), taken.free(plan), spread, forward.owners()
        )
        if backward is None:
            return None
        taken.add(plan, backward)
    return Placed(plan, forward, backward, crosses)


def _forward(
    side: Side,
    free: Free,
    spread: frozenset[int],
    owners: Mapping[int, Sequence[int]] | None,
) -> tuple[Packed | None, bool]:
    """Forwards in this step; of a frozen encoder also in the step before, if each pipeline's work
    then still fits into the time of one step."""
    backbone = side.rooms.backbone
    if side.rooms.plan.crosses_steps:
        found = side.pack(side.ends("periodic", True), free, spread, owners)
        if found is not None:
            lanes: dict[tuple[int, int], list[float]] = {}
            for part in found.parts:
                for stage, (start, end) in enumerate(part.spans):
                    low_high = lanes.setdefault((part.pipeline, stage), [start, end])
                    low_high[:] = min(low_high[0], start), max(low_high[1], end)
            if all(high - low <= backbone.step + 1e-9 for low, high in lanes.values()):
                return found, True
    return side.pack(side.ends("before", True), free, spread, owners), False
