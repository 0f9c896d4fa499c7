"""The paper's coarse-grained schedule: encoder work before and after the LLM's compute only."""

from __future__ import annotations

from optimus_jax.schedule.dependency import order_globally
from optimus_jax.schedule.simulate import Durations, event_driven
from optimus_jax.schedule.task import Kind, Orders, Pipeline, Schedule, Task

Shares = tuple[tuple[int, ...], ...]  # by encoder and pipeline, how many microbatches it takes


def coarse(llm: Orders, pipe: Pipeline, durations: Durations) -> Schedule:
    """Whole encoder forwards before each device's LLM tasks and backwards after them, shared among
    the encoder pipelines so that the big bubbles at both ends hold as much as they can; what does
    not fit lengthens the step (Optimus, section 4.2, InitSchedule).

        0: EF0 F0 F1 B0 F2 B1 F3 B2 B3 EB0
        1: EF1 EF2 EF3 F0 B0 F1 B1 F2 B2 F3 B3 EB1 EB2 EB3

    The microbatch partition is found without enumeration: from even shares, and from shares that
    fill the bubbles first, one microbatch at a time moves to another pipeline of its encoder while
    the step gets shorter.
    """
    counts = [pipe.pipelines(k) for k in range(len(pipe.encoders))]
    even = tuple(
        tuple(pipe.microbatches // n + (j < pipe.microbatches % n) for j in range(n))
        for n in counts
    )
    best = min(
        (_improve(llm, pipe, durations, start) for start in (even, _greedy(llm, pipe, durations))),
        key=lambda found: found[0],
    )
    return best[1]


def _greedy(llm: Orders, pipe: Pipeline, durations: Durations) -> Shares:
    """Shares by pipeline: each further microbatch goes where it sticks out least at the ends."""
    alone = event_driven(Schedule(pipe, llm), durations)
    before = [spans[0][0] if spans else alone.end for spans in alone.intervals]
    after = [alone.end - (spans[-1][1] if spans else 0.0) for spans in alone.intervals]
    found = []
    for k in range(len(pipe.encoders)):
        rows = [pipe.devices_of(k, j) for j in range(pipe.pipelines(k))]
        work = {
            kind: [durations.of(Task(kind, 0, encoder=k), d, pipe) for d in rows[0]]
            for kind in (Kind.EF, Kind.EB)
        }
        shares = [0] * len(rows)

        def overhang(
            pipeline: int,
            rows: list[range] = rows,
            work: dict[Kind, list[float]] = work,
            shares: list[int] = shares,
        ) -> tuple[float, int]:
            """Of the device where most sticks out."""
            n = shares[pipeline] + 1
            ends = (
                max(0.0, n * forward - before[d]) + max(0.0, n * backward - after[d])
                for d, forward, backward in zip(
                    rows[pipeline], work[Kind.EF], work[Kind.EB], strict=True
                )
            )
            return max(ends), shares[pipeline]

        for _ in range(pipe.microbatches):
            shares[min(range(len(rows)), key=overhang)] += 1
        for j, row in enumerate(rows):
            for d, forward, backward in zip(row, work[Kind.EF], work[Kind.EB], strict=True):
                before[d] -= shares[j] * forward
                after[d] -= shares[j] * backward
        found.append(tuple(shares))
    return tuple(found)


def _improve(
    llm: Orders, pipe: Pipeline, durations: Durations, shares: Shares
) -> tuple[float, Schedule]:
    """Moves single microbatches between pipelines, first improvement, until none helps."""

    def build(shares: Shares) -> tuple[float, Schedule]:
        schedule = _with_shares(llm, pipe, durations, shares)
        return event_driven(schedule, durations).end, schedule

    best = build(shares)
    moves = [
        (k, giver, taker)
        for k, row in enumerate(shares)
        for giver in range(len(row))
        for taker in range(len(row))
        if giver != taker
    ]
    improved = True
    while improved:
        improved = False
        for k, giver, taker in moves:
            if not shares[k][giver]:
                continue
            row = list(shares[k])
            row[giver] -= 1
            row[taker] += 1
            moved = (*shares[:k], tuple(row), *shares[k + 1 :])
            found = build(moved)
            if found[0] < best[0] - 1e-9:
                best, shares, improved = found, moved, True
    return best


def _with_shares(llm: Orders, pipe: Pipeline, durations: Durations, shares: Shares) -> Schedule:
    """The coarse schedule in which pipeline j of encoder k takes `shares[k][j]` microbatches."""
    around: list[tuple[list[Task], list[Task]]] = [([], []) for _ in llm]
    for k, row in enumerate(shares):
        rounds = sorted((n, j) for j, count in enumerate(row) for n in range(count))
        for i, (_, j) in enumerate(rounds):
            for device in pipe.devices_of(k, j):
                for tasks, kind in zip(around[device], (Kind.EF, Kind.EB), strict=True):
                    tasks.append(Task(kind, i, encoder=k))
    schedule = Schedule(
        pipe,
        tuple(
            (*before, *order, *after) for (before, after), order in zip(around, llm, strict=True)
        ),
    )
    return order_globally(schedule, event_driven(schedule, durations))
