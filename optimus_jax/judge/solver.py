"""The shortest filling of a small pipeline by a constraint solver: tens of seconds, for a judge."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from optimus_jax.errors import UserError
from optimus_jax.judge.instances import Instance, Optimum
from optimus_jax.schedule.dataflow import Dataflow
from optimus_jax.schedule.filled import lower_bound
from optimus_jax.schedule.simulate import event_driven
from optimus_jax.schedule.task import Kind, Schedule, Task

WORKERS = 2

_Place = tuple[int, Task]  # device and LLM task


def solve(instance: Instance, known: Schedule, seconds: float) -> Optimum:
    """The best filling that CP-SAT finds in `seconds`, and its proven bound. Each encoder unit of a
    microbatch may go to any device; the search starts from `known` and returns nothing longer.

    Raises UserError if the solver is not installed.
    """
    return _Search(_cp_model(), instance, known).run(seconds)


def _cp_model() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise UserError("--solve needs the solver CP-SAT: pip install ortools") from None
    return cp_model


class _Search:
    """One instance as a constraint model. Times are whole numbers of quanta.

    All encoder forwards take equally long, and so do all backwards. So some optimum has, on every
    device, both in the order in which the LLM takes the microbatches: if two of one kind stand
    otherwise, exchanging them delays nothing. The model asks for that order. It also asks that the
    units of a microbatch, which are all alike, stand on devices in ascending order.
    """

    def __init__(self, cp_model: Any, instance: Instance, known: Schedule):
        self.cp_model, self.instance, self.known = cp_model, instance, known
        self.pipe, self.durations = instance.pipe, instance.durations
        self.model = cp_model.CpModel()
        self.most = self._quanta(event_driven(known, self.durations).end)
        simple = lower_bound(instance.llm, self.pipe, self.durations)
        self.least = math.ceil(simple / float(instance.quantum) - 1e-6)
        self.end = self.model.new_int_var(self.least, self.most, "end")
        self.intervals: list[list[Any]] = [[] for _ in range(self.pipe.stages)]
        self.needed = [
            task.microbatch for task in instance.llm[0] if task == Task(Kind.F, task.microbatch)
        ]
        self.llm_start: dict[_Place, Any] = {}
        self.after: dict[_Place, list[_Place]] = defaultdict(list)  # LLM tasks that wait for one
        self.before: dict[_Place, list[_Place]] = defaultdict(list)
        # forward and backward of each unit, in the order in which the LLM needs them
        self.units: list[tuple[Task, Task]] = []
        self.unit_start: dict[Task, Any] = {}
        self.on: dict[Task, list[Any]] = {}  # for each device whether the task runs there
        self._add_llm()
        self._add_encoder()
        for intervals in self.intervals:
            self.model.add_no_overlap(intervals)
        self._order_units()
        self._add_work()
        self._hint()
        self.model.minimize(self.end)

    def run(self, seconds: float) -> Optimum:
        solver = self.cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = seconds
        solver.parameters.num_workers = WORKERS
        status = solver.solve(self.model)
        if status == self.cp_model.INFEASIBLE:
            raise AssertionError(f"{self.instance}: the model excludes a schedule that exists")
        bound = max(self.least, solver.best_objective_bound) * float(self.instance.quantum)
        schedule = self.known
        if status in (self.cp_model.OPTIMAL, self.cp_model.FEASIBLE):
            schedule = self._read(solver)
        best = event_driven(schedule, self.durations).end
        return Optimum(self.instance, best, bound, solver.wall_time, schedule)

    def _quanta(self, time: float) -> int:
        return round(time / float(self.instance.quantum))

    def _length(self, device: int, task: Task) -> int:
        return self._quanta(self.durations.of(task, device, self.pipe))

    def _add_llm(self) -> None:
        llm = self.instance.llm
        for device, order in enumerate(llm):
            for task in order:
                start = self.model.new_int_var(0, self.most, f"{task} on {device}")
                length = self._length(device, task)
                self.llm_start[device, task] = start
                self.intervals[device].append(
                    self.model.new_fixed_size_interval_var(start, length, "")
                )
                self.model.add(self.end >= start + length)
            for task, following in itertools.pairwise(order):
                self._wait((device, task), (device, following))
        flow = Dataflow(self.pipe, llm, encoded=frozenset())
        for value, reader in flow.consumer.items():
            if value in flow.producer:
                self._wait(flow.producer[value], reader)

    def _wait(self, first: _Place, second: _Place) -> None:
        self.model.add(self.llm_start[second] >= self.llm_start[first] + self._length(*first))
        self.after[first].append(second)
        self.before[second].append(first)

    def _add_encoder(self) -> None:
        for i, u in itertools.product(self.needed, range(self.instance.units)):
            unit = Task(Kind.EF, i, units=(u,)), Task(Kind.EB, i, units=(u,))
            self.units.append(unit)
            on = [self.model.new_bool_var(f"{i}.{u} on {d}") for d in range(self.pipe.stages)]
            self.model.add_exactly_one(on)
            for task in unit:
                start = self.model.new_int_var(0, self.most, str(task))
                self.unit_start[task], self.on[task] = start, on
                length = self._length(0, task)
                for device, here in enumerate(on):
                    self.intervals[device].append(
                        self.model.new_optional_fixed_size_interval_var(start, length, here, "")
                    )
            forward, backward = unit
            first, last = (0, Task(Kind.F, i)), (0, Task(Kind.B, i))
            self.model.add(
                self.llm_start[first] >= self.unit_start[forward] + self._length(0, forward)
            )
            done = self.llm_start[last] + self._length(*last)
            self.model.add(self.unit_start[backward] >= done)
            self.model.add(self.end >= self.unit_start[backward] + self._length(0, backward))

    def _order_units(self) -> None:
        """Of equal solutions, the one in which units stand in order."""
        for first, second in itertools.combinations(self.units, 2):
            for earlier, later in zip(first, second, strict=True):
                ready = self.unit_start[earlier] + self._length(0, earlier)
                for both in zip(self.on[earlier], self.on[later], strict=True):
                    self.model.add(self.unit_start[later] >= ready).only_enforce_if(*both)
        for (one, _), (other, _) in itertools.pairwise(self.units):
            if one.microbatch == other.microbatch:
                self.model.add(self._home(one) <= self._home(other))

    def _home(self, task: Task) -> Any:
        """The device of an encoder task."""
        return sum(device * here for device, here in enumerate(self.on[task]))

    def _add_work(self) -> None:
        """What follows from the rest, but helps the solver to see: by the time at which the LLM
        starts on a microbatch, and from that at which it ends, a device does certain work."""
        for device, order in enumerate(self.instance.llm):
            for n, i in enumerate(self.needed):
                first, last = (0, Task(Kind.F, i)), (0, Task(Kind.B, i))
                work = self._llm_work(device, _reach(first, self.before))
                work += self._encoder_work(device, Kind.EF, self.needed[: n + 1])
                self.model.add(self.llm_start[first] >= work)
                work = self._llm_work(device, _reach(last, self.after)) + self._length(*last)
                work += self._encoder_work(device, Kind.EB, self.needed[n:])
                self.model.add(self.end >= self.llm_start[last] + work)
            work = self._llm_work(device, ((device, task) for task in order))
            work += self._encoder_work(device, Kind.EF, self.needed)
            work += self._encoder_work(device, Kind.EB, self.needed)
            self.model.add(self.end >= work)

    def _llm_work(self, device: int, tasks: Iterable[_Place]) -> int:
        return sum(self._length(d, task) for d, task in tasks if d == device)

    def _encoder_work(self, device: int, kind: Kind, microbatches: list[int]) -> Any:
        tasks = [t for unit in self.units for t in unit if t.kind == kind]
        return sum(
            self._length(0, t) * self.on[t][device] for t in tasks if t.microbatch in microbatches
        )

    def _hint(self) -> None:
        """The known schedule, with its units in the order that the model asks for."""
        timing = event_driven(self.known, self.durations)
        starts: dict[tuple[Kind, int], list[int]] = defaultdict(list)
        devices: dict[int, list[int]] = defaultdict(list)  # of the units of a microbatch
        for device, order in enumerate(self.known.orders):
            for task, (start, _) in zip(order, timing.intervals[device], strict=True):
                if not task.kind.is_encoder:
                    self.model.add_hint(self.llm_start[device, task], self._quanta(start))
                    continue
                for k in range(len(self.pipe.units_of(task))):
                    piece = self._length(0, Task(task.kind, task.microbatch, units=(k,)))
                    starts[task.kind, device].append(self._quanta(start) + k * piece)
                    if task.kind == Kind.EF:
                        devices[task.microbatch].append(device)
        for ordered in starts.values():
            ordered.sort(reverse=True)
        for unit in self.units:
            for task in unit:
                home = sorted(devices[task.microbatch])[task.units[0]]
                self.model.add_hint(self.unit_start[task], starts[task.kind, home].pop())
                if task.kind == Kind.EF:
                    for device, here in enumerate(self.on[task]):
                        self.model.add_hint(here, device == home)

    def _read(self, solver: Any) -> Schedule:
        """The solution as a schedule."""
        rows: list[list[tuple[int, Task]]] = [[] for _ in range(self.pipe.stages)]
        for (device, task), start in self.llm_start.items():
            rows[device].append((solver.value(start), task))
        for task, start in self.unit_start.items():
            device = next(d for d, here in enumerate(self.on[task]) if solver.value(here))
            rows[device].append((solver.value(start), self.pipe.short(task, device)))
        orders = (sorted(row, key=lambda entry: entry[0]) for row in rows)
        return Schedule(self.pipe, tuple(tuple(task for _, task in row) for row in orders))


def _reach(task: _Place, edges: dict[_Place, list[_Place]]) -> set[_Place]:
    """All that follows from a task by the edges, without it."""
    found: set[_Place] = set()
    left = [task]
    while left:
        new = set(edges[left.pop()]) - found
        found |= new
        left += new
    return found
