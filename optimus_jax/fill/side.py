"""One direction of the filling problem: forwards with time running backward, or backwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from optimus_jax.fill.backbone import Backbone
from optimus_jax.fill.encoder import EncoderPlan, Work
from optimus_jax.fill.packing import Free, Packed, negated_free, pack
from optimus_jax.fill.windows import SlotRule, Windows, intervals_of, negated


class Rooms:
    """Windows of all ranks for the kernels of one encoder, each made once."""

    def __init__(self, backbone: Backbone, plan: EncoderPlan, rule: SlotRule):
        self.backbone, self.plan, self.rule = backbone, plan, rule
        self._made: dict[object, Windows] = {}

    def get(self, rank: int, forward: bool, unit: bool, ends: str, between: bool) -> Windows:
        """Windows of a rank; those of forwards run backward in time. `ends` and `between` are those
        of intervals_of."""
        key = rank, forward, unit, ends, between
        if key not in self._made:
            found = intervals_of(self.backbone, rank, self.rule, ends, between)
            work = self.plan.forward if forward else self.plan.backward
            assert work is not None
            self._made[key] = Windows(
                negated(found) if forward else found, work.unit if unit else work.whole, self.rule
            )
        return self._made[key]


@dataclasses.dataclass(frozen=True)
class Side:
    """Packs one encoder's forwards, from their deadlines back, or backwards, from their releases
    on. Results are in the backbone's time."""

    rooms: Rooms
    forward: bool

    @property
    def work(self) -> Work:
        plan = self.rooms.plan
        work = plan.forward if self.forward else plan.backward
        assert work is not None
        return work

    @property
    def outer(self) -> str:
        """The open window that this direction's work may always use."""
        return "before" if self.forward else "after"

    @property
    def order(self) -> list[int]:
        numbers = list(range(self.rooms.backbone.microbatches))
        return numbers[::-1] if self.forward else numbers

    def pack(
        self,
        room: Callable[[int, int, bool], Windows],
        free: Free,
        spread: frozenset[int] = frozenset(),
        owners: Mapping[int, Sequence[int]] | None = None,
    ) -> Packed | None:
        """See packing.pack; `free` and the result are in the backbone's time."""
        backbone, forward = self.rooms.backbone, self.forward
        release = [-t for t in backbone.need] if forward else list(backbone.given)
        if forward:
            free = negated_free(free)
        packed = pack(self.rooms.plan, self.work, self.order, release, room, free, spread, owners)
        return packed.negated() if packed and forward else packed

    def ends(self, ends: str, between: bool) -> Callable[[int, int, bool], Windows]:
        """The same windows for all microbatches."""
        return lambda _, rank, unit: self.rooms.get(rank, self.forward, unit, ends, between)
