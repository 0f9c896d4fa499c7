"""Encoder tasks packed into every idle interval of the LLM's timeline."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator
from typing import NamedTuple

from optimus_jax.schedule.bounds import lower_bound as lower_bound
from optimus_jax.schedule.coarse import coarse
from optimus_jax.schedule.complete import least_cap
from optimus_jax.schedule.exchange import place_within
from optimus_jax.schedule.fuse import fuse
from optimus_jax.schedule.packing import NoRoom, Packing, Part, Snapshot
from optimus_jax.schedule.phased import phased
from optimus_jax.schedule.simulate import Durations
from optimus_jax.schedule.task import Kind, Orders, Pipeline, Schedule, ScheduleError
from optimus_jax.schedule.woven import woven

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
    by Program time. Where LLM tasks wait for tensor-parallel collectives (`durations.window`),
    encoder tasks then move into them (`fuse`), or are spread over them (`woven`) if that is
    shorter.

    Raises ScheduleError if no packing has places for its exchanges.
    """
    return _best(llm, pipe, durations, list(_splits(pipe)))


def _best(llm: Orders, pipe: Pipeline, durations: Durations, splits: list[list[Part]]) -> Schedule:
    """The best packing of any of the `splits` of the encoder's work into parts."""
    if not pipe.encoders:
        return Schedule(pipe, llm)
    bound = lower_bound(llm, pipe, durations)
    candidates = []
    for packing in _starts(llm, pipe, durations, splits):
        candidates += [_Candidate.of(packing, merged) for merged in (True, False)]
        if _improve(packing, bound):
            candidates += [_Candidate.of(packing, merged) for merged in (True, False)]
    if not candidates:
        raise ScheduleError(
            f"the cap of {pipe.cap} microbatches is too little for the encoder's saved state: a"
            f" packing needs at least {_least_cap(llm, pipe, durations, splits)}"
        )
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
    best = _repaired(best, candidates[0].end, budget, durations)
    return _fused(best, llm, durations) if any(durations.window) else best.schedule


def _fused(best: _Candidate, llm: Orders, durations: Durations) -> Schedule:
    """With encoder tasks inside LLM tasks, if the Program is then no longer."""
    pipe, found, limit = best.packing.pipe, best.schedule, best.program + _EPSILON
    for other in (fuse(best.schedule, durations), woven(llm, pipe, durations)):
        with contextlib.suppress(ScheduleError):
            placement = place_within(other, durations, limit) if other else None
            if other and placement:
                found, limit = other, placement.timing(durations).end - _EPSILON
    return found


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


def _starts(
    llm: Orders, pipe: Pipeline, durations: Durations, splits: list[list[Part]]
) -> Iterator[Packing]:
    """A packing of each split that finds room; and, where encoders have several stages, whose tasks
    a packing places one by one, the schedules with all of them before and after the LLM's."""
    for parts in splits:
        with contextlib.suppress(NoRoom):
            yield _packed(llm, pipe, durations, parts)
    if all(encoder.stages == 1 for encoder in pipe.encoders):
        return
    for method in (phased, coarse):
        found = method(llm, pipe, durations)
        if not pipe.cap or least_cap(found) <= pipe.cap:
            yield Packing.of(found, durations)


def _whole(pipe: Pipeline) -> list[Part]:
    return [Part(i, (), k) for i in range(pipe.microbatches) for k in range(len(pipe.encoders))]


def _splits(pipe: Pipeline) -> Iterator[list[Part]]:
    """Ways to cut the encoder's work into parts: whole, ends spread, all spread."""
    ends = {0, pipe.microbatches - 1}

    def spread(part: Part) -> list[Part]:
        units = pipe.encoders[part.encoder].units
        return [part._replace(units=(u,)) for u in range(units)] if units > 1 else [part]

    whole = _whole(pipe)
    yield whole
    yield [one for p in whole for one in (spread(p) if p.microbatch in ends else [p])]
    yield [one for p in whole for one in spread(p)]


def _packed(llm: Orders, pipe: Pipeline, durations: Durations, parts: list[Part]) -> Packing:
    """The parts put one by one, in the order in which the LLM needs them; with a cap that leaves no
    room for one of them, once more in the way that needs the least.

    Raises NoRoom if that fails too.
    """
    first = (t for t in llm[pipe.entry] if t.kind == Kind.F)
    rank: dict[int, int] = {}
    for n, task in enumerate(first):
        rank.setdefault(task.microbatch, n)
    for tight in (False, True):
        packing = Packing(llm, pipe, durations, parts, tight)
        try:
            for part in sorted(range(len(parts)), key=lambda p: (rank[parts[p].microbatch], p)):
                packing.put(part)
        except NoRoom:
            if tight:
                raise
            continue
        break
    packing.tight = False
    return packing


def _least_cap(llm: Orders, pipe: Pipeline, durations: Durations, splits: list[list[Part]]) -> int:
    """The least cap with which one of the splits finds room."""
    most = pipe.microbatches * max(pipe.pipelines(k) for k in range(len(pipe.encoders)))
    for cap in range(pipe.cap + 1, most):
        for parts in splits:
            with contextlib.suppress(NoRoom):
                _packed(llm, dataclasses.replace(pipe, cap=cap), durations, parts)
                return cap
    return most


def _improve(packing: Packing, bound: float) -> bool:
    """Shortens a packing by ruin and recreate (Schrimpf et al. 2000): takes a few parts out, puts
    them back at their best places, and keeps what is no worse. Says whether it got shorter."""
    chance = random.Random(0)
    current, first = packing.snapshot(), packing.end
    limit = packing.work + _EFFORT
    while packing.end > bound + _EPSILON and packing.work < limit:
        if _reshuffle(packing, chance) and packing.end <= current.end + _EPSILON:
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
        if _reshuffle(packing, chance) and packing.end < best.program - _EPSILON:
            tries -= 1
            candidate = _Candidate.of(packing, best.merged)
            placed = candidate.placed(durations, best.program + _EPSILON)
            if placed is not None:
                best = placed
                continue
        packing.restore(best.snapshot)
    return best


def _reshuffle(packing: Packing, chance: random.Random) -> bool:
    """Takes out some parts at random, or a microbatch, or neighbours in time; puts them back. False
    if the cap leaves no room for one of them."""
    everything = range(len(packing.parts))
    count = min(chance.choice((1, 1, 2, 2, 3, 4)), len(everything))
    choice = chance.random()
    if choice < 0.5:
        parts = chance.sample(everything, count)
    elif choice < 0.75:
        microbatch = chance.randrange(packing.pipe.microbatches)
        parts = [p for p in everything if packing.parts[p].microbatch == microbatch]
    else:
        first = chance.randrange(len(everything))
        parts = list(everything[first : first + count])
    chance.shuffle(parts)
    packing.take(parts)
    try:
        for part in parts:
            packing.put(part)
    except NoRoom:
        return False
    return True
