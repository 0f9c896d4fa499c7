"""Task orders as a network, with the longest ways through it and the price of a further task."""

from __future__ import annotations

import itertools

from optimus_jax.schedule.dataflow import LLM, Payload, Value, reads_and_writes
from optimus_jax.schedule.simulate import Durations
from optimus_jax.schedule.task import Kind, Orders, Pipeline, ScheduleError, Task

_NEVER = float("inf")


class Network:
    """The orders of an LLM and further encoder tasks, with or without a place in them.

    Tasks are numbers. `head` of a task is its earliest start, `tail` the longest way from its start
    to the end of the step. The longest way through a further task follows from the heads and tails
    of its neighbours, so one pass prices all places for it exactly, as in insertion heuristics for
    shop scheduling (Taillard 1990; Werner and Winkler 1995). Of a chain of tasks through several
    encoder stages those that have no place yet count with their lengths.
    """

    def __init__(self, llm: Orders, pipe: Pipeline, durations: Durations, tight: bool):
        self.pipe, self.durations, self.tight = pipe, durations, tight
        self.tasks: list[Task] = []
        self.device: list[int] = []  # -1 for a task that has no place yet
        self.stage: list[int] = []  # a device that holds the task's layers
        self.orders: list[list[int]] = []
        for device, order in enumerate(llm):
            self.orders.append([self._add(task, device, device) for task in order])

    def _add(self, task: Task, device: int, stage: int) -> int:
        self.tasks.append(task)
        self.device.append(device)
        self.stage.append(stage)
        return len(self.tasks) - 1

    def _complete(self) -> None:
        """Times everything once all tasks are there."""
        self.length = [
            self.durations.of(t, d, self.pipe) for t, d in zip(self.tasks, self.stage, strict=True)
        ]
        self.encoder = [task.encoder if task.kind.is_encoder else -1 for task in self.tasks]
        self._set_edges()
        self._connect()
        self.work = 0  # tasks timed so far, a measure of effort that is the same on every machine
        self._time()

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

    def _start(self, n: int, device: int) -> tuple[float, float]:
        """The earliest start of a task on a device, and when what it waits for ends: it must not
        stand before that. Tasks of its chain that have no place yet pass on what they wait for."""
        earliest, ready = self.release[n], -_NEVER
        for m in self.before[n]:
            if self.device[m] >= 0:
                start = self.head[m]
                end = start + self.length[m]
            else:
                start, end = self._start(m, -1)
            away = self._away(n, m) if self.device[m] != device or device < 0 else 0.0
            earliest, ready = max(earliest, start + self.length[m] + away), max(ready, end)
        return earliest, ready

    def _rest(self, n: int, device: int) -> tuple[float, float]:
        """The longest way after a task on a device, and when what waits for it starts (if `tight`,
        ends): it must not stand after that. Tasks of its chain that have no place yet pass on what
        waits for them."""
        rest, due = self.delivery[n], _NEVER
        for m in self.after[n]:
            if self.device[m] >= 0:
                way, start = self.tail[m], self.head[m]
                if self.tight:
                    start += self.length[m]
            else:
                way, start = self._rest(m, -1)
                way += self.length[m]
            away = self._away(n, m) if self.device[m] != device or device < 0 else 0.0
            rest, due = max(rest, way + away), min(due, start)
        return rest, due

    def _followers(self, n: int) -> set[int]:
        """The tasks with a place that wait for a task, or for one of its chain that has none."""
        found: set[int] = set()
        for m in self.after[n]:
            found |= {m} if self.device[m] >= 0 else self._followers(m)
        return found

    def _best(self, n: int, device: int, low: int = 0, high: float = _NEVER) -> tuple[float, int]:
        """The shortest longest way through task `n` on a device, and its position there, which is
        from `low` to `high`; infinity if there is none.

        Only positions before what waits for `n` and after what it waits for: no cycle arises.
        """
        head, tail, length = self.head, self.tail, self.length
        earliest, not_before = self._start(n, device)
        rest, not_after = self._rest(n, device)
        late = self.tight and self.tasks[n].kind == Kind.EF
        followers = self._followers(n) if self.tight else ()
        # in a chain the first place that lengthens nothing leaves the rest of it most room
        chained = self.pipe.encoders[self.encoder[n]].stages > 1
        enough = self.end - length[n] + 1e-9 if chained else -_NEVER
        order = self.orders[device]
        best, at, free = _NEVER, len(order), 0.0
        for position, m in enumerate(order):
            over = head[m] >= not_after or m in followers
            if (head[m] + length[m] > not_before or over) and low <= position <= high:
                way = max(free, earliest) + max(tail[m], rest)
                if late or way < best - 1e-9:
                    best, at = way, position
                    if not late and (self.tight or way <= enough):
                        break
            if over:
                break
            free = head[m] + length[m]
        else:
            way = max(free, earliest) + rest
            if low <= len(order) <= high and (late or way < best - 1e-9):
                best, at = way, len(order)
        return round(best + length[n], 9), at
