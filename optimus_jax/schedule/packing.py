"""Packing: LLM orders that take in encoder tasks, and the exact price of every place for one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import NamedTuple

from optimus_jax.schedule.complete import least_cap as least_cap
from optimus_jax.schedule.dataflow import LLM, Payload, Value, reads_and_writes
from optimus_jax.schedule.simulate import Durations
from optimus_jax.schedule.task import Kind, Orders, Pipeline, Schedule, ScheduleError, Task

_NEVER = float("inf")


class NoRoom(ScheduleError):
    """The cap on saved encoder state leaves no place for a part."""


class Part(NamedTuple):
    """Units of one microbatch in one encoder, () for all: a forward and its backward."""

    microbatch: int
    units: tuple[int, ...] = ()
    encoder: int = 0


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Where every task of a Packing stands, and the time of the whole."""

    orders: tuple[tuple[int, ...], ...]
    end: float


class _Bounds(NamedTuple):
    """What an encoder task has to keep to: its earliest start, the longest way after it, and the
    times before which it must not stand in an order, and after which."""

    earliest: float
    rest: float
    not_before: float
    not_after: float


class Packing:
    """The orders of an LLM with any of the encoder `parts` in them, under event-driven timing.

    Tasks are numbers. `head` of a task is its earliest start, `tail` the longest way from its start
    to the end of the step. The longest way through a further task follows from the heads and tails
    of its neighbours, so one pass prices all places for it exactly, as in insertion heuristics for
    shop scheduling (Taillard 1990; Werner and Winkler 1995). A part runs through the stages of one
    encoder pipeline; with several, its tasks are placed one after another, and those that still
    have no place count with their lengths.

    With `pipe.cap` no device ever holds saved state of more units than that. If `tight`, forwards
    stand as late as they may and backwards as early: that needs the least room.
    """

    def __init__(
        self,
        llm: Orders,
        pipe: Pipeline,
        durations: Durations,
        parts: Iterable[tuple[int, tuple[int, ...]] | Part],
        tight: bool = False,
    ):
        self.pipe, self.durations, self.tight = pipe, durations, tight
        self.parts = [Part(*part) for part in parts]
        self.tasks: list[Task] = []
        self.device: list[int] = []  # -1 for a task that has no place yet
        self.stage: list[int] = []  # a device that holds the task's layers
        self.orders: list[list[int]] = []
        for device, order in enumerate(llm):
            self.orders.append([self._add(task, device, device) for task in order])
        # forward tasks of each part by stage, and backward tasks likewise
        self.numbers = [self._chains(part) for part in self.parts]
        self.length = [
            durations.of(t, d, pipe) for t, d in zip(self.tasks, self.stage, strict=True)
        ]
        self.encoder = [task.encoder if task.kind.is_encoder else -1 for task in self.tasks]
        self._set_edges()
        self._connect()
        self.work = 0  # tasks timed so far, a measure of effort that is the same on every machine
        self._time()

    def _add(self, task: Task, device: int, stage: int) -> int:
        self.tasks.append(task)
        self.device.append(device)
        self.stage.append(stage)
        return len(self.tasks) - 1

    def _chains(self, part: Part) -> tuple[list[int], list[int]]:
        stages = self.pipe.devices_of(part.encoder, 0)
        chains = []
        for kind in (Kind.EF, Kind.EB):
            task = Task(kind, part.microbatch, units=part.units, encoder=part.encoder)
            chains.append([self._add(task, -1, s) for s in stages])
        return chains[0], chains[1]

    def _set_edges(self) -> None:
        """Travel times, and the collectives over replicas around all tasks or the LLM's."""
        durations, encoders = self.durations, range(len(self.pipe.encoders))
        self.llm_travel = durations.travel(LLM)
        self.feature_travel = [durations.travel(Payload("feature", k)) for k in encoders]
        self.hidden_travel = [durations.travel(Payload("hidden", k)) for k in encoders]
        free = [durations.overlap and k >= 0 for k in self.encoder]
        self.release = [0.0 if f else durations.gather for f in free]
        self.delivery = [0.0 if f else durations.scatter for f in free]

    def _connect(self) -> None:
        """Fills in which tasks each task waits for and which wait for it."""
        producer: dict[Value, int] = {}
        reads = []
        encoded = frozenset(t.microbatch for t in self.tasks if t.kind == Kind.EF)
        for n, task in enumerate(self.tasks):
            read, written = reads_and_writes(task, self.stage[n], self.pipe, encoded)
            reads.append(read)
            producer.update(dict.fromkeys(written, n))
        self.before = [list(dict.fromkeys(producer[v] for v in read)) for read in reads]
        self.after: list[list[int]] = [[] for _ in self.tasks]
        for n, others in enumerate(self.before):
            for other in others:
                self.after[other].append(n)
        self.waits = [sum(self.device[m] >= 0 for m in others) for others in self.before]

    def put(self, part: int, pipelines: Iterable[int] | None = None) -> None:
        """Puts a part where the step grows least; of such places where it leaves most slack.

        Forward and backward go to one pipeline, of `pipelines` if given, since the saved inputs
        stay there: both decide on it. Raises NoRoom if the cap leaves no place.
        """
        encoder, chains = self.parts[part].encoder, self.numbers[part]

        def price(pipeline: int) -> tuple[float, float]:
            ways = []
            for forward, backward, device in self._places(part, pipeline):
                low = self._room_from(forward, backward, device)
                ways.append(self._best(forward, device, low)[0])
                ways.append(self._best(backward, device)[0])
            return max(round(self.end, 9), *ways), round(sum(ways), 9)

        among = range(self.pipe.pipelines(encoder)) if pipelines is None else pipelines
        prices = sorted((price(j), j) for j in among)
        for (way, _), pipeline in prices:
            if way < _NEVER and self._try(part, pipeline):
                return
            if not self.pipe.cap:
                break
        raise NoRoom(
            f"the cap of {self.pipe.cap} microbatches leaves no place for"
            f" {self.tasks[chains[0][0]]}"
        )

    def _places(self, part: int, pipeline: int) -> Iterable[tuple[int, int, int]]:
        """Forward, backward and device of each stage."""
        devices = self.pipe.devices_of(self.parts[part].encoder, pipeline)
        return zip(*self.numbers[part], devices, strict=True)

    def _try(self, part: int, pipeline: int) -> bool:
        """Places all tasks of a part, or none if the cap does not allow it."""
        stages = list(self._places(part, pipeline))
        for forward, backward, device in stages:
            low = self._room_from(forward, backward, device)
            if not self._insert(forward, device, low, _NEVER):
                self.take([part])
                return False
        for _, backward, device in reversed(stages):
            if not self._insert(backward, device, 0, self._room_until(backward, device)):
                self.take([part])
                return False
        return True

    def _insert(self, n: int, device: int, low: int, high: float) -> bool:
        way, position = self._best(n, device, low, high)
        if way == _NEVER:
            return False
        self.orders[device].insert(position, n)
        self._settle(n, device)
        self._time()
        return True

    def take(self, parts: list[int]) -> None:
        """Takes parts out."""
        for part in parts:
            for n in itertools.chain(*self.numbers[part]):
                if self.device[n] >= 0:
                    self.orders[self.device[n]].remove(n)
                    self._settle(n, -1)
        self._time()

    def snapshot(self) -> Snapshot:
        return Snapshot(tuple(map(tuple, self.orders)), self.end)

    def restore(self, snapshot: Snapshot) -> None:
        """Back to a snapshot that holds all parts."""
        for device, order in enumerate(snapshot.orders):
            self.orders[device] = list(order)
            for n in order:
                self.device[n] = device
        self.waits = [len(others) for others in self.before]
        self._time()

    def schedule(self, merged: bool) -> Schedule:
        """The orders as a Schedule. If `merged`, neighbours of one kind and microbatch become one
        task, which changes no event-driven time (and so is not done in encoders of several stages);
        apart they leave exchanges more places."""

        def same(n: int) -> object:
            task = self.tasks[n]
            if not merged or not task.kind.is_encoder:
                return n
            if self.pipe.encoders[task.encoder].stages > 1:
                return n
            return (task.kind, task.microbatch, task.encoder)

        return Schedule(
            self.pipe,
            tuple(
                tuple(self._joined(list(group)) for _, group in itertools.groupby(order, same))
                for order in self.orders
            ),
        )

    def _joined(self, numbers: list[int]) -> Task:
        first = self.tasks[numbers[0]]
        if len(numbers) == 1:
            return first
        units = tuple(sorted(u for n in numbers for u in self.pipe.units_of(self.tasks[n])))
        every = len(units) == self.pipe.encoders[first.encoder].units
        return dataclasses.replace(first, units=() if every else units)

    def _settle(self, n: int, device: int) -> None:
        self.device[n] = device
        for m in self.after[n]:
            self.waits[m] += 1 if device >= 0 else -1

    def _time(self) -> None:
        """Heads and tails of all tasks that have a place, and the end of the step."""
        count, device, length, after = len(self.tasks), self.device, self.length, self.after
        head, tail, following = list(self.release), list(self.delivery), [-1] * count
        waits = list(self.waits)
        for order in self.orders:
            for n, m in itertools.pairwise(order):
                following[n] = m
                waits[m] += 1
        ready = [order[0] for order in self.orders if order and not waits[order[0]]]
        done = []
        while ready:
            n = ready.pop()
            done.append(n)
            end = head[n] + length[n]
            for m in (*after[n], following[n]):
                if m < 0 or device[m] < 0:
                    continue
                arrival = end if device[m] == device[n] else end + self._away(n, m)
                if arrival > head[m]:
                    head[m] = arrival
                waits[m] -= 1
                if not waits[m]:
                    ready.append(m)
        if len(done) < sum(map(len, self.orders)):
            raise ScheduleError("the orders of the LLM wait for one another in a cycle")
        whole = 0.0
        for n in reversed(done):
            rest = tail[n]
            for m in (*after[n], following[n]):
                if m >= 0 and device[m] >= 0:
                    way = tail[m] if device[m] == device[n] else tail[m] + self._away(n, m)
                    if way > rest:
                        rest = way
            tail[n] = rest + length[n]
            if tail[n] + head[n] > whole:
                whole = tail[n] + head[n]
        self.head, self.tail, self.end = head, tail, whole
        self.work += len(done)

    def _away(self, n: int, m: int) -> float:
        """Seconds in which a value travels between two tasks of different devices."""
        k, other = self.encoder[n], self.encoder[m]
        if k < 0 and other < 0:
            return self.llm_travel
        return self.hidden_travel[k] if k == other else self.feature_travel[max(k, other)]

    def _bounds(self, n: int, device: int) -> _Bounds:
        """Tasks of a chain that have no place yet pass on what they wait for, and what waits for
        them."""
        head, tail, length = self.head, self.tail, self.length
        earliest, rest = self.release[n], self.delivery[n]
        not_before, not_after = -_NEVER, _NEVER
        for m in self.before[n]:
            if self.device[m] >= 0:
                start = head[m]
                not_before = max(not_before, start + length[m])
            else:
                further = self._bounds(m, -1)
                start, not_before = further.earliest, max(not_before, further.not_before)
            away = self._away(n, m) if self.device[m] != device or device < 0 else 0.0
            earliest = max(earliest, start + length[m] + away)
        for m in self.after[n]:
            if self.device[m] >= 0:
                way = tail[m]
                not_after = min(not_after, head[m])
            else:
                further = self._bounds(m, -1)
                way, not_after = further.rest + length[m], min(not_after, further.not_after)
            away = self._away(n, m) if self.device[m] != device or device < 0 else 0.0
            rest = max(rest, way + away)
        return _Bounds(earliest, rest, not_before, not_after)

    def _best(
        self, n: int, device: int, low: int = 0, high: float = _NEVER
    ) -> tuple[float, int]:
        """The shortest longest way through task `n` on a device, and its position there, which is
        from `low` to `high`; infinity if there is none.

        Only positions before what waits for `n` and after what it waits for: no cycle arises.
        """
        head, tail, length = self.head, self.tail, self.length
        earliest, rest, not_before, not_after = self._bounds(n, device)
        late = self.tight and self.tasks[n].kind == Kind.EF
        order = self.orders[device]
        best, at, free = _NEVER, len(order), 0.0
        position, m = 0, -1
        for position, m in enumerate(order):
            over = head[m] >= not_after
            if (head[m] + length[m] > not_before or over) and low <= position <= high:
                way = max(free, earliest) + max(tail[m], rest)
                if late or way < best - 1e-9:
                    best, at = way, position
                    if self.tight and not late:
                        break
            if over:
                break
            free = head[m] + length[m]
        else:
            way = max(free, earliest) + rest
            if low <= len(order) <= high and (late or way < best - 1e-9):
                best, at = way, len(order)
        return round(best + length[n], 9), at

    def _saved(self, n: int, device: int) -> tuple[list[int], int]:
        """Units of the encoder of task `n` with saved state after each task of a device, and how
        many the task has itself."""
        encoder, saved, total = self.encoder[n], [], 0
        for m in self.orders[device]:
            if self.encoder[m] == encoder:
                count = len(self.pipe.units_of(self.tasks[m]))
                total += count if self.tasks[m].kind == Kind.EF else -count
            saved.append(total)
        return saved, len(self.pipe.units_of(self.tasks[n]))

    def _room_from(self, forward: int, backward: int, device: int) -> int:
        """The first position from which there is room for the saved state of a forward up to the
        earliest place of its backward."""
        cap = self.pipe.units_cap(self.encoder[forward])
        if cap is None:
            return 0
        saved, own = self._saved(forward, device)
        if own > cap:
            return len(saved) + 1
        ready = self._bounds(backward, device).not_before
        low = 0
        for position, m in enumerate(self.orders[device]):
            if self.head[m] + self.length[m] > ready:
                break
            if saved[position] + own > cap:
                low = position + 2
        return low

    def _room_until(self, backward: int, device: int) -> float:
        """The last position before which a backward must free its saved state."""
        cap = self.pipe.units_cap(self.encoder[backward])
        if cap is None:
            return _NEVER
        saved, _ = self._saved(backward, device)
        return next((k for k, count in enumerate(saved) if count > cap), _NEVER)
