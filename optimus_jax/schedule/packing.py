"""Packing: LLM orders that take in encoder tasks, and the exact price of every place for one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import NamedTuple

from optimus_jax.schedule.network import Network
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


class Packing(Network):
    """The orders of an LLM with any of the encoder `parts` in them, under event-driven timing.

    A part runs through the stages of one encoder pipeline; with several, its tasks are placed one
    after another.

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
        super().__init__(llm, pipe, durations, tight)
        self.parts = [Part(*part) for part in parts]
        # forward tasks of each part by stage, and backward tasks likewise
        self.numbers = [self._chains(part) for part in self.parts]
        self._complete()

    @classmethod
    def of(cls, schedule: Schedule, durations: Durations) -> Packing:
        """That of a schedule whose encoder tasks run all layers of their stage."""
        llm = tuple(tuple(t for t in o if not t.kind.is_encoder) for o in schedule.orders)
        forwards = (t for order in schedule.orders for t in order if t.kind == Kind.EF)
        parts = dict.fromkeys(Part(t.microbatch, t.units, t.encoder) for t in forwards)
        packing = cls(llm, schedule.pipeline, durations, parts)
        number: dict[tuple[int, Task], int] = {}
        for row in packing.numbers:
            number |= {(packing.stage[n], packing.tasks[n]): n for n in itertools.chain(*row)}
        own = [iter(order) for order in packing.orders]
        orders = []
        for device, order in enumerate(schedule.orders):
            places = (device % schedule.pipeline.encoders[t.encoder].stages for t in order)
            orders.append(
                tuple(
                    number[place, task] if task.kind.is_encoder else next(own[device])
                    for task, place in zip(order, places, strict=True)
                )
            )
        packing.restore(Snapshot(tuple(orders), 0.0))
        return packing

    def _chains(self, part: Part) -> tuple[list[int], list[int]]:
        stages = self.pipe.devices_of(part.encoder, 0)
        chains = []
        for kind in (Kind.EF, Kind.EB):
            task = Task(kind, part.microbatch, units=part.units, encoder=part.encoder)
            chains.append([self._add(task, -1, s) for s in stages])
        return chains[0], chains[1]

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
        ready = self._start(backward, device)[1]
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
