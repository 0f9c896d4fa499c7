"""Packing: LLM orders that take in encoder tasks, and the exact price of every place for one."""

from __future__ import annotations

import dataclasses
import itertools

from optimus_jax.schedule.dataflow import Value, reads_and_writes
from optimus_jax.schedule.simulate import Durations
from optimus_jax.schedule.task import Kind, Orders, Pipeline, Schedule, ScheduleError, Task

Part = tuple[int, tuple[int, ...]]  # microbatch and units of an encoder forward and its backward


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Where every task of a Packing stands, and the time of the whole."""

    orders: tuple[tuple[int, ...], ...]
    end: float


class Packing:
    """The orders of an LLM with any of the encoder `parts` in them, under event-driven timing.

    Tasks are numbers. `head` of a task is its earliest start, `tail` the longest way from its start
    to the end of the step. The longest way through a further task follows from the heads and tails
    of its neighbours, so one pass prices all places for it exactly, as in insertion heuristics for
    shop scheduling (Taillard 1990; Werner and Winkler 1995).
    """

    def __init__(self, llm: Orders, pipe: Pipeline, durations: Durations, parts: list[Part]):
        self.pipe, self.durations, self.parts = pipe, durations, parts
        self.tasks: list[Task] = []
        self.device: list[int] = []  # -1 for a task that has no place yet
        self.orders: list[list[int]] = []
        for device, order in enumerate(llm):
            self.orders.append([self._add(task, device) for task in order])
        self.numbers = [
            (self._add(Task(Kind.EF, i, units=u), -1), self._add(Task(Kind.EB, i, units=u), -1))
            for i, u in parts
        ]
        self.length = [
            durations.of(t, d, pipe) for t, d in zip(self.tasks, self.device, strict=True)
        ]
        self.is_encoder = [task.kind.is_encoder for task in self.tasks]
        self.travel = durations.travel(False), durations.travel(True)
        self._connect()
        self.work = 0  # tasks timed so far, a measure of effort that is the same on every machine
        self._time()

    def _add(self, task: Task, device: int) -> int:
        self.tasks.append(task)
        self.device.append(device)
        return len(self.tasks) - 1

    def _connect(self) -> None:
        """Fills in which tasks each task waits for and which wait for it."""
        producer: dict[Value, int] = {}
        reads = []
        encoded = frozenset(i for i, _ in self.parts)
        for n, task in enumerate(self.tasks):
            read, written = reads_and_writes(task, self.device[n], self.pipe, encoded)
            reads.append(read)
            producer.update(dict.fromkeys(written, n))
        self.before = [list(dict.fromkeys(producer[v] for v in read)) for read in reads]
        self.after: list[list[int]] = [[] for _ in self.tasks]
        for n, others in enumerate(self.before):
            for other in others:
                self.after[other].append(n)
        self.waits = [sum(self.device[m] >= 0 for m in others) for others in self.before]

    def put(self, part: int) -> None:
        """Puts a part where the step grows least; of such places where it leaves most slack.

        Forward and backward go to one device, since the saved inputs stay there: both decide on it.
        """
        pair = self.numbers[part]

        def price(device: int) -> tuple[float, float]:
            ways = [self._best(n, device)[0] for n in pair]
            return max(round(self.end, 9), *ways), round(sum(ways), 9)

        device = min(range(self.pipe.stages), key=price)
        for n in pair:
            position = self._best(n, device)[1]
            self.orders[device].insert(position, n)
            self._settle(n, device)
            self._time()

    def take(self, parts: list[int]) -> None:
        """Takes parts out."""
        for part in parts:
            for n in self.numbers[part]:
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
        task, which changes no event-driven time; apart they leave exchanges more places."""

        def same(n: int) -> object:
            task = self.tasks[n]
            return (task.kind, task.microbatch) if merged and task.kind.is_encoder else n

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
        return dataclasses.replace(first, units=() if len(units) == self.pipe.units else units)

    def _settle(self, n: int, device: int) -> None:
        self.device[n] = device
        for m in self.after[n]:
            self.waits[m] += 1 if device >= 0 else -1

    def _time(self) -> None:
        """Heads and tails of all tasks that have a place, and the end of the step."""
        count, device, length, after = len(self.tasks), self.device, self.length, self.after
        head, tail, following = [0.0] * count, [0.0] * count, [-1] * count
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
        for n in reversed(done):
            rest = 0.0
            for m in (*after[n], following[n]):
                if m >= 0 and device[m] >= 0:
                    way = tail[m] if device[m] == device[n] else tail[m] + self._away(n, m)
                    if way > rest:
                        rest = way
            tail[n] = rest + length[n]
        self.head, self.tail = head, tail
        self.end = max(tail[order[0]] + head[order[0]] for order in self.orders if order)
        self.work += len(done)

    def _away(self, n: int, m: int) -> float:
        """Seconds in which a value travels between two tasks of different devices."""
        return self.travel[self.is_encoder[n] or self.is_encoder[m]]

    def _best(self, n: int, device: int) -> tuple[float, int]:
        """The shortest longest way through task `n` on a device, and its position there.

        Only positions before what waits for `n` and after what it waits for: no cycle arises.
        """
        head, tail, length = self.head, self.tail, self.length
        earliest, rest = 0.0, 0.0
        not_after, not_before = float("inf"), float("-inf")
        for m in self.before[n]:
            if self.device[m] >= 0:
                end = head[m] + length[m]
                not_before = max(not_before, end)
                away = self._away(n, m) if self.device[m] != device else 0.0
                earliest = max(earliest, end + away)
        for m in self.after[n]:
            if self.device[m] >= 0:
                not_after = min(not_after, head[m])
                away = self._away(n, m) if self.device[m] != device else 0.0
                rest = max(rest, tail[m] + away)
        order = self.orders[device]
        best, at, free = float("inf"), len(order), 0.0
        for position, m in enumerate(order):
            if head[m] + length[m] > not_before:
                way = max(free, earliest) + max(tail[m], rest)
                if way < best - 1e-9:
                    best, at = way, position
            if head[m] >= not_after:
                break
            free = head[m] + length[m]
        else:
            way = max(free, earliest) + rest
            if way < best - 1e-9:
                best, at = way, len(order)
        return round(best + length[n], 9), at
