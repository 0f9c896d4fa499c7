"""Proof that a Program does what its Schedule says: a symbolic run of the tables."""

from __future__ import annotations

from collections import Counter

import numpy as np

from optimus_jax.schedule.dataflow import Dataflow, Value, Values
from optimus_jax.schedule.program import NONE, Program, alphabet
from optimus_jax.schedule.task import Kind, Schedule, ScheduleError, Task


def check_complete(schedule: Schedule) -> None:
    """Raises ScheduleError unless each LLM task stands once on each device, and the encoder tasks
    of every encoded microbatch cover each unit and layer once forward and once backward."""
    pipe = schedule.pipeline
    wanted = {
        Task(kind, i, chunk)
        for kind in (Kind.F, Kind.B)
        for i in range(pipe.microbatches)
        for chunk in range(pipe.chunks)
    }
    covered: Counter[tuple[Kind, int, int, int]] = Counter()
    homes: dict[tuple[int, int], int] = {}
    if len(schedule.orders) != pipe.stages:
        raise ScheduleError(f"{len(schedule.orders)} orders for {pipe.stages} devices")
    for device, order in enumerate(schedule.orders):
        counts = Counter(task for task in order if not task.kind.is_encoder)
        for task in sorted(wanted | counts.keys(), key=str):
            if counts[task] != (task in wanted):
                raise ScheduleError(
                    f"{task} stands {counts[task]} times on device {device},"
                    f" wanted {int(task in wanted)}"
                )
        for task in order:
            if not task.kind.is_encoder:
                continue
            units, (begin, end) = pipe.units_of(task), pipe.layers_of(task)
            if max(units) >= pipe.units or not 0 <= begin < end <= pipe.encoder_layers:
                raise ScheduleError(
                    f"{task} on device {device}: there are {pipe.units} units and"
                    f" {pipe.encoder_layers} layers"
                )
            for unit in units:
                place = homes.setdefault((task.microbatch, unit), device)
                if place != device:
                    raise ScheduleError(
                        f"{task} stands on device {device}, but unit {unit} of microbatch"
                        f" {task.microbatch} is on device {place}, where its saved inputs are"
                    )
                for layer in range(begin, end):
                    covered[task.kind, task.microbatch, unit, layer] += 1
    for kind in (Kind.EF, Kind.EB):
        for i in sorted(schedule.encoded | {i for _, i, _, _ in covered}):
            for unit in range(pipe.units):
                for layer in range(pipe.encoder_layers):
                    count = covered[kind, i, unit, layer]
                    if count != 1:
                        raise ScheduleError(
                            f"{kind}{i}.{unit} runs layer {layer} {count} times, wanted 1"
                        )


def validate(program: Program, schedule: Schedule) -> None:
    """Raises ScheduleError, naming tick and device, unless the program runs every task of the
    schedule once and in its order, finds each input in the slot that it reads, never writes over a
    live slot, stays within its slots, pairs every receive with a send, and leaves nothing over."""
    if program.pipeline != schedule.pipeline:
        raise ScheduleError(f"program of {program.pipeline}, schedule of {schedule.pipeline}")
    shape = program.ticks, program.pipeline.stages, program.columns.width
    if program.table.shape != shape or program.pattern.shape != shape[:1]:
        raise ScheduleError(
            f"tables of {program.table.shape} and {program.pattern.shape}, wanted {shape}"
            f" and {shape[:1]}"
        )
    check_complete(schedule)
    orders = tuple(tuple(map(schedule.pipeline.short, order)) for order in schedule.orders)
    _Replay(program, Schedule(schedule.pipeline, orders)).run()


class _Replay:
    def __init__(self, program: Program, schedule: Schedule):
        self.program, self.schedule = program, schedule
        self.flow = Dataflow.of(schedule)
        self.live: list[dict[tuple[str, int], object]] = [{} for _ in schedule.orders]
        self.done = [0] * len(schedule.orders)
        self.where = ""

    def run(self) -> None:
        for tick in range(self.program.ticks):
            for device in range(self.program.pipeline.stages):
                self.where = f"tick {tick} device {device}"
                task = self.program.task(tick, device)
                if task is not None:
                    self._order(task, device)
                    self._task(task, device, self.program.table[tick, device])
            self._exchange(tick)
        for device, order in enumerate(self.schedule.orders):
            if self.done[device] < len(order):
                raise ScheduleError(f"device {device} never runs {order[self.done[device]]}")
            for (pool, slot), value in self.live[device].items():
                raise ScheduleError(f"device {device} ends with {value} in {pool} slot {slot}")

    def _order(self, task: Task, device: int) -> None:
        order, done = self.schedule.orders[device], self.done[device]
        if task in order[:done]:
            raise ScheduleError(f"{self.where}: {task} runs a second time")
        if done == len(order) or order[done] != task:
            wanted = order[done] if done < len(order) else "nothing more"
            raise ScheduleError(f"{self.where}: {task} runs where the schedule has {wanted}")
        self.done[device] += 1

    def _task(self, task: Task, device: int, row: np.ndarray) -> None:
        pipe, at = self.program.pipeline, self.program.columns
        reads, writes = self.flow.io[device, task]
        self._whole_row(task, device, row, reads, writes)
        if task.kind.is_encoder:
            begin, _ = pipe.layers_of(task)
            opens = task.kind == Kind.EF and begin == 0
            closes = task.kind == Kind.EB and begin == 0
            for k, unit in enumerate(pipe.units_of(task)):
                state = f"saved state of microbatch {task.microbatch} unit {unit}"
                slot = int(row[at["encoder"]][k])
                (self._put if opens else self._get)(device, "encoder", slot, state, keep=not closes)
        else:
            v = task.chunk * pipe.stages + device
            state = f"saved state of microbatch {task.microbatch} stage {v}"
            put = self._put if task.kind == Kind.F else self._get
            put(device, "saved", int(row[at["saved"]]), state)
        # outputs first: they may not share a slot with the task's own inputs
        for name, act, values in (("write", self._put, writes), ("read", self._get, reads)):
            for k, value in enumerate(v for v in values if not v.is_hidden):
                cell = row[at["feature"]][k] if value.is_feature else row[at[name]]
                act(device, _pool(value), int(cell), value)

    def _whole_row(
        self, task: Task, device: int, row: np.ndarray, reads: Values, writes: Values
    ) -> None:
        """What follows from task and device alone; and cells without a meaning hold nothing."""
        pipe, at = self.program.pipeline, self.program.columns
        features = [v for v in (*reads, *writes) if v.is_feature]
        plain = {v for v in (*reads, *writes) if not v.is_feature and not v.is_hidden}
        wanted = at.idle_row()
        for name in ("kind", "microbatch", "send", "receive", "feature_send", "feature_receive"):
            wanted[at[name]] = row[at[name]]  # checked by others
        filled: dict[str, int] = {"feature": len(features)}
        if task.kind.is_encoder:
            units = pipe.units_of(task)
            wanted[at["count"]] = len(units)
            wanted[at["begin"]], wanted[at["end"]] = pipe.layers_of(task)
            filled |= {"encoder": len(units), "unit": len(units)}
        else:
            v = task.chunk * pipe.stages + device
            wanted[at["chunk"]], wanted[at["layers"]] = task.chunk, pipe.llm_layers[v]
            wanted[at["first"]], wanted[at["last"]] = v == 0, v == pipe.virtual_stages - 1
            wanted[at["saved"]] = row[at["saved"]]
            for name, values in (("read", reads), ("write", writes)):
                if plain & set(values):
                    wanted[at[name]] = row[at[name]]
        for name, count in filled.items():
            wanted[at[name]][:count] = row[at[name]][:count]
        for name, cells in at.at.items():
            if np.any(wanted[cells] != row[cells]):
                raise ScheduleError(
                    f"{self.where}: {task} has {name} {row[cells]}, wanted {wanted[cells]}"
                )

    def _exchange(self, tick: int) -> None:
        patterns, at = alphabet(self.program.pipeline), self.program.columns
        index = int(self.program.pattern[tick])
        if not 0 <= index < len(patterns):
            raise ScheduleError(f"tick {tick}: pattern {index} is not in the alphabet")
        pattern, rows = patterns[index], self.program.table[tick]
        partner = {a: b for a, b in pattern.links} | {b: a for a, b in pattern.links}
        arrivals: list[tuple[int, str, int, object]] = []
        for device, row in enumerate(rows):
            self.where = f"tick {tick} device {device}"
            other = partner.get(device)
            for features in (False, True):
                prefix, pool = ("feature_", "feature") if features else ("", "wire")
                sends = np.atleast_1d(row[at[prefix + "send"]])
                receives = np.atleast_1d(row[at[prefix + "receive"]])
                if other is None or features != pattern.features:
                    if (sends != NONE).any() or (receives != NONE).any():
                        raise ScheduleError(
                            f"{self.where} sends or receives, but pattern {index} gives it no link"
                        )
                    continue
                answers = np.atleast_1d(rows[other][at[prefix + "receive"]])
                offers = np.atleast_1d(rows[other][at[prefix + "send"]])
                for k, slot in enumerate(sends):
                    if (slot == NONE) != (answers[k] == NONE):
                        verb = "sends to" if slot != NONE else "sends nothing, but is awaited by"
                        raise ScheduleError(f"{self.where} {verb} device {other} without answer")
                    if (receives[k] == NONE) != (offers[k] == NONE):
                        verb = "receives from" if receives[k] != NONE else "ignores what comes from"
                        raise ScheduleError(f"{self.where} {verb} device {other} without a match")
                    if slot != NONE:
                        value = self._take(device, pool, int(slot))
                        arrivals.append((other, pool, int(answers[k]), value))
        for device, pool, slot, value in arrivals:
            self.where = f"tick {tick} device {device}"
            self._put(device, pool, slot, value)

    def _put(self, device: int, pool: str, slot: int, value: object, keep: bool = False) -> None:
        size = getattr(self.program.slots, pool)
        if not 0 <= slot < size:
            raise ScheduleError(
                f"{self.where}: {value} is written to {pool} slot {slot}, there are {size}"
            )
        if (pool, slot) in self.live[device]:
            raise ScheduleError(
                f"{self.where}: {value} overwrites {self.live[device][pool, slot]},"
                f" still live in {pool} slot {slot}"
            )
        self.live[device][pool, slot] = value

    def _get(self, device: int, pool: str, slot: int, value: object, keep: bool = False) -> None:
        found = self.live[device].get((pool, slot), "nothing")
        if found != value:
            raise ScheduleError(
                f"{self.where}: expected {value} in {pool} slot {slot}, found {found}"
            )
        if not keep:
            del self.live[device][pool, slot]

    def _take(self, device: int, pool: str, slot: int) -> object:
        if (pool, slot) not in self.live[device]:
            raise ScheduleError(f"{self.where} sends {pool} slot {slot}, which holds nothing")
        return self.live[device].pop((pool, slot))


def _pool(value: Value) -> str:
    return "feature" if value.is_feature else "wire"
