"""coarse at kernel resolution: the first phase of the paper's bubble scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from optimus_jax.fill.backbone import Backbone
from optimus_jax.fill.encoder import EncoderPlan
from optimus_jax.fill.filling import Filling
from optimus_jax.fill.packing import Placed, Taken, slices
from optimus_jax.fill.side import Rooms, Side
from optimus_jax.fill.windows import SlotRule


def coarse(backbone: Backbone, plans: Sequence[EncoderPlan]) -> Filling:
    """Encoder forwards before all LLM passes of their rank, backwards after them (Optimus, section
    4.2, InitSchedule). Which pipeline takes which microbatch follows from list scheduling; the
    paper enumerates all partitions. The i-th forward to finish is LLM microbatch i (section 4.3).
    """
    taken = Taken(backbone, slices(plans))
    placed = []
    for plan in plans:
        rooms = Rooms(backbone, plan, SlotRule(use=False))
        side = Side(rooms, True)
        forward = side.pack(side.ends("before", False), taken.free(plan))
        assert forward is not None  # open windows hold everything
        taken.add(plan, forward)
        backward = None
        if plan.backward is not None:
            side = Side(rooms, False)
            backward = side.pack(
                side.ends("after", False), taken.free(plan), owners=forward.owners()
            )
            assert backward is not None
            taken.add(plan, backward)
        placed.append(Placed(plan, forward, backward))
    return Filling("coarse", backbone, SlotRule(use=False), tuple(placed))
