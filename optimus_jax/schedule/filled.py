"""Encoder tasks packed into every idle interval of the LLM's timeline."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from optimus_jax.schedule.exchange import place_within
from optimus_jax.schedule.packing import Packing, Part, Snapshot
from optimus_jax.schedule.simulate import Durations, event_driven
from optimus_jax.schedule.task import Kind, Orders, Pipeline, Schedule, ScheduleError, Task

_EPSILON = 1e-9
_NEVER = float("inf")
_EFFORT = 60_000  # tasks timed in search of a shorter step, for each packing
_PLACING = 150_000  # effort for Programs: placing the exchanges of n tasks takes about n^2
_REPAIRS = 25  # at most so many Programs in a repair


def filled_whole(llm: Orders, pipe: Pipeline, durations: Durations) -> Schedule:
    """As `filled`, but no microbatch's pictures are spread over devices: what that is worth."""
    return _best(llm, pipe, durations, [_whole(pipe)])


def filled(llm: Orders, pipe: Pipeline, durations: Durations) -> Schedule:
    """Encoder tasks in all bubbles: warm-up, cool-down and the waits between them.

        0: EF0.0 F0 EF2 F1 B0 F2 B1 B2 EB2 ...
        1: EF0.1 EF1 F0 B0 F1 B1 F2 B2 EB0.1 ...

    Packs whole microbatches, microbatches spread in units over all devices, and whole ones with
    the first and the last spread (their encoder work is what no other packing can hide), each as
    first packed and improved by ruin and recreate. Keeps the one whose Program is shortest; of
    equal ones the one with the shorter event-driven time, then the fewest tasks. If its Program
    takes longer than the shortest packing without rendezvous, repairs it by further rounds judged
    by Program time.

    Raises ScheduleError if no packing has places for its exchanges.
    """
    return _best(llm, pipe, durations, list(_splits(pipe)))


def _best(llm: Orders, pipe: Pipeline, durations: Durations, splits: list[list[Part]]) -> Schedule:
    """The best packing of any of the `splits` of the encoder's work into parts."""
    bound = lower_bound(llm, pipe, durations)
    candidates = []
    for parts in splits:
        packing = _packed(llm, pipe, durations, parts)
        candidates += [_Candidate.of(packing, merged) for merged in (True, False)]
        if _improve(packing, bound):
            candidates += [_Candidate.of(packing, merged) for merged in (True, False)]
    candidates.sort(key=lambda c: (round(c.end, 9), c.size))
    best, budget = None, _PLACING
    for candidate in candidates:
        budget -= candidate.size**2
        # a Program is never shorter than the event-driven time of its schedule
        if best and (candidate.end > best.program - _EPSILON or budget < 0):
            break
        best = candidate.placed(durations, best.program - _EPSILON if best else _NEVER) or best
    if best is None:
        raise ScheduleError("no packing has places for its exchanges without a cycle")
    return _repaired(best, candidates[0].end, budget, durations).schedule


class _Candidate(NamedTuple):
    """A packing at one moment: its schedule, event-driven time and Program time."""

    packing: Packing
    merged: bool
    snapshot: Snapshot
    schedule: Schedule
    program: float = _NEVER

    @classmethod
    def of(cls, packing: Packing, merged: bool) -> _Candidate:
        return cls(packing, merged, packing.snapshot(), packing.schedule(merged))

    @property
    def end(self) -> float:
        return self.snapshot.end

    @property
    def size(self) -> int:
        return sum(map(len, self.schedule.orders))

    def placed(self, durations: Durations, limit: float) -> _Candidate | None:
        """The same with its Program time; None if that is `limit` or more, or if exchanges find no
        place."""
        try:
            placement = place_within(self.schedule, durations, limit)
        except ScheduleError:
            return None
        if placement is None:
            return None
        return self._replace(program=placement.timing(durations).end)


def lower_bound(llm: Orders, pipe: Pipeline, durations: Durations) -> float:
    """Seconds that no packing on this LLM order can beat: no LLM task starts before the first
    microbatch is encoded by all devices at once, the last backward is spread likewise, and no
    device does more than all its time."""
    alone = event_driven(Schedule(pipe, llm), durations)
    at_once = -(-pipe.units // pipe.stages) / pipe.units
    forward = durations.of(Task(Kind.EF, 0), 0, pipe)
    backward = durations.of(Task(Kind.EB, 0), 0, pipe)
    drained = alone.intervals[0][-1][1] + backward * at_once
    work = sum(end - start for row in alone.intervals for start, end in row)
    work += pipe.microbatches * (forward + backward)
    return max(forward * at_once + max(alone.end, drained), work / pipe.stages)


def _whole(pipe: Pipeline) -> list[Part]:
    return [(i, ()) for i in range(pipe.microbatches)]


def _splits(pipe: Pipeline) -> Iterator[list[Part]]:
    """Ways to cut the encoder's work into parts: whole, ends spread, all spread."""
    single: list[tuple[int, ...]] = [(u,) for u in range(pipe.units)] if pipe.units > 1 else [()]
    ends = {0, pipe.microbatches - 1}
    everything = range(pipe.microbatches)
    yield _whole(pipe)
    yield [(i, u) for i in everything for u in (single if i in ends else [()])]
    yield [(i, u) for i in everything for u in single]


def _packed(llm: Orders, pipe: Pipeline, durations: Durations, parts: list[Part]) -> Packing:
    """The parts put one by one, in the order in which the LLM needs them."""
    packing = Packing(llm, pipe, durations, parts)
    rank = {t.microbatch: n for n, t in enumerate(llm[0]) if t == Task(Kind.F, t.microbatch)}
    for part in sorted(range(len(parts)), key=lambda p: (rank[parts[p][0]], p)):
        packing.put(part)
    return packing


def _improve(packing: Packing, bound: float) -> bool:
    """Shortens a packing by ruin and recreate (Schrimpf et al. 2000): takes a few parts out, puts
    them back at their best places, and keeps what is no worse. Says whether it got shorter."""
    chance = random.Random(0)
    current, first = packing.snapshot(), packing.end
    limit = packing.work + _EFFORT
    while packing.end > bound + _EPSILON and packing.work < limit:
        _reshuffle(packing, chance)
        if packing.end <= current.end + _EPSILON:
            current = packing.snapshot()
        else:
            packing.restore(current)
    return packing.end < first - _EPSILON


def _repaired(best: _Candidate, goal: float, budget: int, durations: Durations) -> _Candidate:
    """Ruin and recreate again, judged by Program time, until the Program takes `goal`."""
    packing, chance = best.packing, random.Random(0)
    packing.restore(best.snapshot)
    tries = min(_REPAIRS, max(budget, 0) // best.size**2)
    rounds = 10 * tries
    while best.program > goal + _EPSILON and tries and rounds:
        rounds -= 1
        _reshuffle(packing, chance)
        if packing.end < best.program - _EPSILON:
            tries -= 1
            candidate = _Candidate.of(packing, best.merged)
            placed = candidate.placed(durations, best.program + _EPSILON)
            if placed is not None:
                best = placed
                continue
        packing.restore(best.snapshot)
    return best


def _reshuffle(packing: Packing, chance: random.Random) -> None:
    """Takes out some parts at random, or a microbatch, or neighbours in time; puts them back."""
    everything = range(len(packing.parts))
    count = min(chance.choice((1, 1, 2, 2, 3, 4)), len(everything))
    choice = chance.random()
    if choice < 0.5:
        parts = chance.sample(everything, count)
    elif choice < 0.75:
        microbatch = chance.randrange(packing.pipe.microbatches)
        parts = [p for p in everything if packing.parts[p][0] == microbatch]
    else:
        first = chance.randrange(len(everything))
        parts = list(everything[first : first + count])
    chance.shuffle(parts)
    packing.take(parts)
    for part in parts:
        packing.put(part)
