"""The LLM's pipeline orders by name, as action tables equal to torch.distributed.pipelining's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from optimus_jax.schedule.actions import Action, ActionTable, Loop, check
from optimus_jax.schedule.task import ScheduleError
from optimus_jax.schedule.zero_bubble import interleaved_zero_bubble, zb_h1, zb_v


def gpipe(stages: int, microbatches: int, chunks: int = 1) -> ActionTable:
    """All forwards, then all backwards (Huang et al. 2019; torch's ScheduleGPipe).

        0F0,0F1,0F2,0B0,0B1,0B2
        1F0,1F1,1F2,1B0,1B1,1B2

    Raises ScheduleError if there are several chunks.
    """
    loop = _one_chunk("gpipe", "looped_bfs", stages, microbatches, chunks)
    return _alternate(loop, [loop.total] * stages)


def one_f_one_b(stages: int, microbatches: int, chunks: int = 1) -> ActionTable:
    """1F1B (Narayanan et al. 2021, 2.2; torch's Schedule1F1B, which wants as many microbatches as
    stages; here there may be fewer).

        0F0,0F1,0B0,0F2,0B1,0B2
        1F0,1B0,1F1,1B1,1F2,1B2

    Raises ScheduleError if there are several chunks.
    """
    loop = _one_chunk("1f1b", "interleaved_1f1b", stages, microbatches, chunks)
    return _alternate(loop, loop.warmup(1))


def interleaved_1f1b(
    stages: int, microbatches: int, chunks: int = 1, warmup: Sequence[int] | None = None
) -> ActionTable:
    """1F1B over chunks (Narayanan et al. 2021, 2.2; torch's ScheduleInterleaved1F1B).

        0F0,0F1,2F0,2F1,0F2,2B0,0F3,2B1,2F2,0B0,2F3,0B1,2B2,2B3,0B2,0B3
        1F0,1F1,3F0,3B0,3F1,3B1,1F2,1B0,1F3,1B1,3F2,3B2,3F3,3B3,1B2,1B3

    `warmup` holds the forwards of each rank before its first pair of a forward and a backward, cut
    to all forwards; default is Megatron-LM's, 2 (stages - rank - 1) + (chunks - 1) stages. If the
    microbatches are no multiple of the stages, the size of their groups (see Loop) takes the place
    of `stages` in the second term, as in torch. One chunk keeps the same formula; its deferred
    warm-up is that of 1F1B.

    Raises ScheduleError if the groups would differ in size, and for a warm-up that deadlocks.
    """
    loop = Loop(stages, microbatches, chunks)
    if warmup is None:
        return _alternate(loop, loop.warmup(2))
    if len(warmup) != stages or min(warmup) < 0:
        raise ScheduleError(
            f"warm-up forwards are one count from 0 on for each of {stages} ranks,"
            f" got {list(warmup)}"
        )
    table = _alternate(loop, warmup)
    try:
        check(
            table, stages, microbatches, chunks, rank_of_stage("interleaved_1f1b", stages, chunks)
        )
    except ScheduleError as error:
        raise ScheduleError(f"with warm-up forwards {list(warmup)} {error}") from error
    return table


def deferred_warmup(stages: int, chunks: int, microbatches: int | None = None) -> tuple[int, ...]:
    """Warm-up forwards of each rank, (stages - rank - 1) + (chunks - 1) stages, for
    `interleaved_1f1b`: later forward dependency points than Megatron-LM's warm-up gives. The step
    is as long where transfers cost nothing and longer where they do. (The aim is Optimus, section
    4.3; the paper states no formula, this one is found by simulation.)

    `microbatches` matters only if it is no multiple of `stages`.
    """
    return Loop(stages, stages if microbatches is None else microbatches, chunks).warmup(1)


def looped_bfs(stages: int, microbatches: int, chunks: int = 1) -> ActionTable:
    """All microbatches through one chunk, then through the next, and backwards the other way round
    (Lamy-Poirier 2023, breadth-first pipeline parallelism; torch's ScheduleLoopedBFS).

        0F0,0F1,2F0,2F1,2B1,2B0,0B1,0B0
        1F0,1F1,3F0,3F1,3B1,3B0,1B1,1B0
    """
    Loop(stages, microbatches, chunks)  # refuses sizes that are not positive
    table = []
    for rank in range(stages):
        order = [
            Action(stage, "F", i)
            for stage in range(rank, stages * chunks, stages)
            for i in range(microbatches)
        ]
        table.append(tuple(order + [Action(a.stage, "B", a.microbatch) for a in reversed(order)]))
    return tuple(table)


def _one_chunk(name: str, other: str, stages: int, microbatches: int, chunks: int) -> Loop:
    loop = Loop(stages, microbatches, chunks)
    if chunks != 1:
        raise ScheduleError(f"{name} runs one chunk for each rank, got {chunks}; {other} runs more")
    return loop


def _alternate(loop: Loop, warmup: Sequence[int]) -> ActionTable:
    """On each rank its warm-up forwards, then a forward and a backward in turn, then backwards."""
    table = []
    for rank, count in enumerate(warmup):
        order = [loop.forward(rank, k) for k in range(min(count, loop.total))]
        for k in range(loop.total):
            if count + k < loop.total:
                order.append(loop.forward(rank, count + k))
            order.append(loop.backward(rank, k))
        table.append(tuple(order))
    return tuple(table)


ACTION_ORDERS: dict[str, Callable[[int, int, int], ActionTable]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "looped_bfs": looped_bfs,
    "interleaved_zero_bubble": interleaved_zero_bubble,
    "zb_h1": zb_h1,
    "zb_v": zb_v,
}


def rank_of_stage(order_name: str, stages: int, chunks: int) -> tuple[int, ...]:
    """The rank of each virtual stage: the chunks of zb_v go down the ranks and up again, those of
    the other orders round and round. Raises ScheduleError for a name not in ACTION_ORDERS."""
    if order_name not in ACTION_ORDERS:
        raise ScheduleError(
            f"no order is called {order_name!r}; there are {', '.join(ACTION_ORDERS)}"
        )
    down = tuple(range(stages))
    turn = order_name == "zb_v"
    return sum(((down[::-1] if turn and c % 2 else down) for c in range(chunks)), ())
