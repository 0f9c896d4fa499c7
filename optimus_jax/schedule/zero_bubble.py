"""Pipeline orders that split the backward, so that weight gradients fill bubbles."""

from __future__ import annotations

from collections import Counter

from optimus_jax.schedule.actions import Action, ActionTable, Loop
from optimus_jax.schedule.task import ScheduleError


def zb_h1(stages: int, microbatches: int, chunks: int = 1) -> ActionTable:
    """ZB-H1 (Qi et al. 2023, 2.1): the order of 1F1B, with W as many microbatches behind I as rank
    r has fewer warm-up forwards than rank 0, so that every rank keeps as many microbatches as rank
    0 of 1F1B does.

        0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2
        1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2

    A rank idles (stages - 1)(F + I - W) if there are as many microbatches as stages and W takes no
    longer than I. Raises ScheduleError if there are several chunks.
    """
    Loop(stages, microbatches, chunks)  # refuses sizes that are not positive
    if chunks != 1:
        raise ScheduleError(
            f"zb_h1 runs one chunk for each rank, got {chunks}; interleaved_zero_bubble runs more"
        )
    return interleaved_zero_bubble(stages, microbatches)


def interleaved_zero_bubble(stages: int, microbatches: int, chunks: int = 1) -> ActionTable:
    """ZB-H1 over chunks (torch's ScheduleInterleavedZeroBubble): the order of interleaved 1F1B with
    the warm-up of `deferred_warmup`, and W of rank r r steps behind I.

        0F0,0F1,2F0,2F1,2I0,2W0,2I1,2W1,0I0,0W0,0I1,0W1
        1F0,1F1,3F0,3I0,3F1,3I1,3W0,1I0,3W1,1I1,1W0,1W1

    Raises ScheduleError if groups of microbatches would differ in size (see Loop).
    """
    loop = Loop(stages, microbatches, chunks)
    table = []
    for rank, warmup in enumerate(loop.warmup(1)):
        order = [loop.forward(rank, k) for k in range(warmup)]
        for k in range(loop.total + rank):
            if warmup + k < loop.total:
                order.append(loop.forward(rank, warmup + k))
            if k < loop.total:
                order.append(loop.backward(rank, k, "I"))
            if k >= rank:
                order.append(loop.backward(rank, k - rank, "W"))
        table.append(tuple(order))
    return tuple(table)


def zb_v(stages: int, microbatches: int, chunks: int = 2) -> ActionTable:
    """ZB-V (Qi et al. 2023, section 6; torch's ScheduleZBVZeroBubble): two chunks for each rank,
    the first down the ranks, the second up again, so that rank r has the virtual stages r and
    2 stages - 1 - r. No rank idles between its first and last action if F, I and W take the same
    time and there are 2 stages - 1 microbatches or more; memory as 1F1B.

        0F0,0F1,0F2,3F0,3I0,3W0,3F1,3I1,3W1,0I0,0W0,3F2,3I2,3W2,0I1,0W1,0I2,0W2
        1F0,2F0,1F1,2F1,2I0,2W0,1F2,1I0,1W0,2F2,2I1,2W1,1I1,2I2,1I2,1W1,2W2,1W2

    Raises ScheduleError unless there are two chunks.
    """
    Loop(stages, microbatches, chunks)  # refuses sizes that are not positive
    if chunks != 2:
        raise ScheduleError(f"zb_v runs two chunks for each rank, got {chunks}")
    # the order is one for a full pipeline, and with fewer microbatches the same without the others
    full = max(microbatches, 2 * stages - 1)
    table = []
    for rank in range(stages):
        order = _zb_v_rank(rank, stages, full)
        table.append(tuple(action for action in order if action.microbatch < microbatches))
    return tuple(table)


def _zb_v_rank(rank: int, stages: int, microbatches: int) -> list[Action]:
    down, up = rank, 2 * stages - 1 - rank
    order: list[Action] = []
    ran: Counter[tuple[int, str]] = Counter()

    def run(stage: int, kinds: str) -> None:
        """The next microbatch of each of `kinds`."""
        for kind in kinds:
            order.append(Action(stage, kind, ran[stage, kind]))
            ran[stage, kind] += 1

    for _ in range(2 * (stages - rank) - 1):
        run(down, "F")
    for _ in range(rank):
        run(up, "F")
        run(down, "F")
    for _ in range(stages - rank):
        run(up, "FIW")
    while ran[up, "F"] < microbatches:
        if ran[down, "F"] < microbatches:
            run(down, "F")
        run(down, "IW")
        run(up, "FIW")
    for _ in range(rank):
        run(down, "I")
        run(up, "I")
    for _ in range(stages - rank):
        run(down, "IW")
    for stage in (up, down):
        while ran[stage, "W"] < ran[stage, "I"]:
            run(stage, "W")
    return order
