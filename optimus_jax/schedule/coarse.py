"""The paper's coarse-grained schedule: encoder work before and after the LLM's compute only."""

from __future__ import annotations

from optimus_jax.schedule.dependency import order_globally
from optimus_jax.schedule.simulate import Durations, event_driven
from optimus_jax.schedule.task import Kind, Orders, Pipeline, Schedule, Task


def coarse(llm: Orders, pipe: Pipeline, durations: Durations) -> Schedule:
    """Whole encoder forwards before each device's LLM tasks and backwards after them, shared among
    the encoder pipelines so that the big bubbles at both ends hold as much as they can; what does
    not fit lengthens the step (Optimus, section 4.2, InitSchedule).

        0: EF0 F0 F1 B0 F2 B1 F3 B2 B3 EB0
        1: EF1 EF2 EF3 F0 B0 F1 B1 F2 B2 F3 B3 EB1 EB2 EB3

    The microbatch partition is found without enumeration: from even shares, and from shares that
    fill the bubbles first, one microbatch at a time moves to another pipeline while the step gets
    shorter.
    """
    even = [
        pipe.microbatches // pipe.stages + (d < pipe.microbatches % pipe.stages)
        for d in range(pipe.stages)
    ]
    best = min(
        (_improve(llm, pipe, durations, start) for start in (even, _greedy(llm, pipe, durations))),
        key=lambda found: found[0],
    )
    return best[1]


def _greedy(llm: Orders, pipe: Pipeline, durations: Durations) -> list[int]:
    """Shares by pipeline: each further microbatch goes where it sticks out least at the ends."""
    alone = event_driven(Schedule(pipe, llm), durations)
    before = [spans[0][0] for spans in alone.intervals]
    after = [alone.end - spans[-1][1] for spans in alone.intervals]
    forward = durations.of(Task(Kind.EF, 0), 0, pipe)
    backward = durations.of(Task(Kind.EB, 0), 0, pipe)
    shares = [0] * pipe.stages

    def overhang(device: int) -> tuple[float, int]:
        n = shares[device] + 1
        ends = n * forward - before[device], n * backward - after[device]
        return max(0.0, ends[0]) + max(0.0, ends[1]), shares[device]

    for _ in range(pipe.microbatches):
        shares[min(range(pipe.stages), key=overhang)] += 1
    return shares


def _improve(
    llm: Orders, pipe: Pipeline, durations: Durations, shares: list[int]
) -> tuple[float, Schedule]:
    """Moves single microbatches between pipelines, first improvement, until none helps."""

    def build(shares: list[int]) -> tuple[float, Schedule]:
        schedule = _with_shares(llm, pipe, durations, shares)
        return event_driven(schedule, durations).end, schedule

    best = build(shares)
    improved = True
    while improved:
        improved = False
        for giver in range(pipe.stages):
            for taker in range(pipe.stages):
                if giver == taker or not shares[giver]:
                    continue
                moved = list(shares)
                moved[giver] -= 1
                moved[taker] += 1
                found = build(moved)
                if found[0] < best[0] - 1e-9:
                    best, shares, improved = found, moved, True
    return best


def _with_shares(llm: Orders, pipe: Pipeline, durations: Durations, shares: list[int]) -> Schedule:
    """The coarse schedule in which encoder pipeline d takes `shares[d]` microbatches."""
    rounds = [(k, d) for d, n in enumerate(shares) for k in range(n)]
    owner = {i: d for i, (_, d) in enumerate(sorted(rounds))}

    def place(owner: dict[int, int]) -> Schedule:
        orders = []
        for device, order in enumerate(llm):
            mine = [i for i, d in owner.items() if d == device]
            forwards = tuple(Task(Kind.EF, i) for i in mine)
            orders.append(forwards + order + tuple(Task(Kind.EB, i) for i in mine))
        return Schedule(pipe, tuple(orders))

    schedule = place(owner)
    return order_globally(schedule, event_driven(schedule, durations))
