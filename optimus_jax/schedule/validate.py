"""Proof that a Program does what its Schedule says: a symbolic run of the tables."""

from __future__ import annotations

import numpy as np

from optimus_jax.schedule.columns import NONE
from optimus_jax.schedule.complete import check_complete as check_complete
from optimus_jax.schedule.dataflow import LLM, Dataflow, Value, Values, is_kept, of_encoder, of_llm
from optimus_jax.schedule.program import Program, alphabet
from optimus_jax.schedule.slots import state_of_encoder, state_of_llm
from optimus_jax.schedule.task import Kind, Schedule, ScheduleError, Task

_Pool = tuple[str, int]  # name, encoder


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
    for name, rows in (("prologue", program.prologue), ("epilogue", program.epilogue)):
        if rows.shape[1:] != shape[1:]:
            raise ScheduleError(f"{name} of {rows.shape}, wanted rows of {shape[1:]}")
    check_complete(schedule)
    pipe = schedule.pipeline
    orders = tuple(
        tuple(pipe.short(task, device) for task in order)
        for device, order in enumerate(schedule.orders)
    )
    _Replay(program, Schedule(pipe, orders)).run()


class _Replay:
    def __init__(self, program: Program, schedule: Schedule):
        self.program, self.schedule = program, schedule
        self.flow = Dataflow.of(schedule)
        self.live: list[dict[tuple[_Pool, int], object]] = [{} for _ in schedule.orders]
        self.done = [0] * len(schedule.orders)
        self.where = ""

    def run(self) -> None:
        self._rows("prologue")
        for tick in range(self.program.ticks):
            for device in range(self.program.pipeline.stages):
                self.where = f"tick {tick} device {device}"
                task = self.program.task(tick, device)
                if task is not None:
                    self._run(task, device, self.program.table[tick, device])
            self._exchange(tick)
        self._rows("epilogue")
        for device, order in enumerate(self.schedule.orders):
            if self.done[device] < len(order):
                raise ScheduleError(f"device {device} never runs {order[self.done[device]]}")
            for (pool, slot), value in self.live[device].items():
                raise ScheduleError(
                    f"device {device} ends with {value} in {_words(pool)} slot {slot}"
                )

    def _rows(self, part: str) -> None:
        """Rows beside a collective over replicas: encoder tasks alone, and nothing moves."""
        table, at = getattr(self.program, part), self.program.columns
        for number, rows in enumerate(table):
            for device, row in enumerate(rows):
                self.where = f"{part} row {number} device {device}"
                for name in ("send", "receive", "e_send", "e_receive"):
                    if (np.atleast_1d(row[at[name]]) != NONE).any():
                        raise ScheduleError(f"{self.where} sends or receives, but has no exchange")
                task = self.program.task_beside(part, number, device)
                if task is None:
                    continue
                wanted = Kind.EF if part == "prologue" else Kind.EB
                if task.kind != wanted:
                    raise ScheduleError(f"{self.where}: {task} is no {wanted.words}")
                self._run(task, device, row)

    def _run(self, task: Task, device: int, row: np.ndarray) -> None:
        order, done = self.schedule.orders[device], self.done[device]
        if task in order[:done]:
            raise ScheduleError(f"{self.where}: {task} runs a second time")
        if done == len(order) or order[done] != task:
            wanted = order[done] if done < len(order) else "nothing more"
            raise ScheduleError(f"{self.where}: {task} runs where the schedule has {wanted}")
        self.done[device] += 1
        self._task(task, device, row)

    def _task(self, task: Task, device: int, row: np.ndarray) -> None:
        """Outputs first: they may not share a slot with the task's own inputs."""
        pipe, at = self.program.pipeline, self.program.columns
        wanted = at.idle_row()
        for name in ("send", "receive", "e_send", "e_receive"):
            wanted[at[name]] = row[at[name]]  # checked by `_exchange`
        moves = []
        if task.llm_part:
            moves.append(self._llm(task.llm_part, device, row, wanted))
        if task.encoder_part:
            moves.append(self._encoder(task.encoder_part, device, row, wanted))
        for name, cells in at.at.items():
            if np.any(wanted[cells] != row[cells]):
                raise ScheduleError(
                    f"{self.where}: {task} has {name} {row[cells]}, wanted {wanted[cells]}"
                )
        if task.llm_part:
            state, slot = state_of_llm(task, device, pipe), int(row[at["saved"]])
            self._state(device, ("saved", 0), slot, state, task.kind == Kind.F, closes=True)
        if task.encoder_part:
            self._encoder_states(task.encoder_part, device, row)
        for _, writes in moves:
            for value, slot in writes:
                self._put(device, _pool(value), slot, value)
        for reads, _ in moves:
            for value, slot in reads:
                self._get(device, _pool(value), slot, value)

    def _llm(self, task: Task, device: int, row: np.ndarray, wanted: np.ndarray) -> _Moves:
        """What follows from task and device alone; cells without a meaning hold nothing."""
        pipe, at = self.program.pipeline, self.program.columns
        v = task.chunk * pipe.stages + device
        wanted[at["kind"]], wanted[at["microbatch"]] = row[at["kind"]], row[at["microbatch"]]
        wanted[at["chunk"]], wanted[at["layers"]] = task.chunk, pipe.llm_layers[v]
        wanted[at["first"]] = v == pipe.first_stage
        wanted[at["last"]] = v == pipe.virtual_stages - 1
        wanted[at["saved"]] = row[at["saved"]]
        sides = of_llm(task, device, pipe, self.flow.encoded)
        return self._cells(row, wanted, sides, "")

    def _encoder(self, task: Task, device: int, row: np.ndarray, wanted: np.ndarray) -> _Moves:
        pipe, at = self.program.pipeline, self.program.columns
        first, _ = pipe.stage_layers(task.encoder, device)
        begin, end = pipe.layers_of(task, device)
        count = len(pipe.units_of(task))
        for name in ("e_kind", "encoder", "e_microbatch"):
            wanted[at[name]] = row[at[name]]
        wanted[at["count"]] = count
        wanted[at["begin"]], wanted[at["end"]] = begin - first, end - first
        wanted[at["embeds"]] = begin == 0
        wanted[at["projects"]] = end == pipe.encoders[task.encoder].total
        for name in ("unit", "e_saved"):
            wanted[at[name]][:count] = row[at[name]][:count]
        return self._cells(row, wanted, of_encoder(task, device, pipe), "e_")

    def _cells(
        self, row: np.ndarray, wanted: np.ndarray, sides: tuple[Values, Values], prefix: str
    ) -> _Moves:
        """The values that are read and written, with their slots."""
        at, found = self.program.columns, []
        for name, values in zip(("read", "write"), sides, strict=True):
            cells = []
            for k, value in enumerate(v for v in values if not is_kept(v, self.flow.pipe)):
                where = at["feature" if not prefix and value.is_feature else prefix + name]
                if isinstance(where, slice):
                    where = where.start + k
                wanted[where] = row[where]
                cells.append((value, int(row[where])))
            found.append(cells)
        return found[0], found[1]

    def _encoder_states(self, task: Task, device: int, row: np.ndarray) -> None:
        pipe, at, k = self.program.pipeline, self.program.columns, task.encoder
        begin, _ = pipe.layers_of(task, device)
        at_start = begin == pipe.stage_layers(k, device)[0]
        pool, cap = ("encoder", k), pipe.units_cap(k)
        for n, unit in enumerate(pipe.units_of(task)):
            slot = int(row[at["e_saved"]][n])
            opens = task.kind == Kind.EF and at_start
            self._state(device, pool, slot, state_of_encoder(task, unit), opens, at_start)
            live = sum(key == pool for key, _ in self.live[device])
            if cap is not None and live > cap:
                raise ScheduleError(
                    f"{self.where}: {task} makes {live} units of encoder {k} with saved state, the"
                    f" cap of {pipe.cap} microbatches allows {cap}"
                )

    def _state(
        self, device: int, pool: _Pool, slot: int, state: str, opens: bool, closes: bool
    ) -> None:
        if opens:
            self._put(device, pool, slot, state)
        else:
            self._get(device, pool, slot, state, keep=not closes)

    def _exchange(self, tick: int) -> None:
        patterns, at = alphabet(self.program.pipeline), self.program.columns
        index = int(self.program.pattern[tick])
        if not 0 <= index < len(patterns):
            raise ScheduleError(f"tick {tick}: pattern {index} is not in the alphabet")
        pattern, rows = patterns[index], self.program.table[tick]
        partner = {a: b for a, b in pattern.links} | {b: a for a, b in pattern.links}
        arrivals: list[tuple[int, _Pool, int, object]] = []
        pool = pattern.payload.content, pattern.payload.encoder
        for device, row in enumerate(rows):
            self.where = f"tick {tick} device {device}"
            other = partner.get(device)
            for prefix in ("", "e_"):
                sends = np.atleast_1d(row[at[prefix + "send"]])
                receives = np.atleast_1d(row[at[prefix + "receive"]])
                if other is None or (prefix == "") != (pattern.payload == LLM):
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
                        key = pool if prefix else ("wire", 0)
                        value = self._take(device, key, int(slot))
                        arrivals.append((other, key, int(answers[k]), value))
        for device, key, slot, value in arrivals:
            self.where = f"tick {tick} device {device}"
            self._put(device, key, slot, value)

    def _put(self, device: int, pool: _Pool, slot: int, value: object) -> None:
        size = self.program.slots.of(*pool)
        if not 0 <= slot < size:
            raise ScheduleError(
                f"{self.where}: {value} is written to {_words(pool)} slot {slot}, there are {size}"
            )
        if (pool, slot) in self.live[device]:
            raise ScheduleError(
                f"{self.where}: {value} overwrites {self.live[device][pool, slot]},"
                f" still live in {_words(pool)} slot {slot}"
            )
        self.live[device][pool, slot] = value

    def _get(self, device: int, pool: _Pool, slot: int, value: object, keep: bool = False) -> None:
        found = self.live[device].get((pool, slot), "nothing")
        if found != value:
            raise ScheduleError(
                f"{self.where}: expected {value} in {_words(pool)} slot {slot}, found {found}"
            )
        if not keep:
            del self.live[device][pool, slot]

    def _take(self, device: int, pool: _Pool, slot: int) -> object:
        if (pool, slot) not in self.live[device]:
            raise ScheduleError(
                f"{self.where} sends {_words(pool)} slot {slot}, which holds nothing"
            )
        return self.live[device].pop((pool, slot))


_Moves = tuple[list[tuple[Value, int]], list[tuple[Value, int]]]  # read and written, with slots


def _pool(value: Value) -> _Pool:
    content, encoder = value.payload
    return ("wire", 0) if content == "llm" else (content, encoder)


def _words(pool: _Pool) -> str:
    return f"{pool[0]}{f' (encoder {pool[1]})' if pool[1] else ''}"
