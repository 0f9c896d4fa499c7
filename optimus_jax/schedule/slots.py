"""The second pass of lowering: values into slots, by liveness, and tasks into rows."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import numpy as np

from optimus_jax.schedule.columns import KINDS, columns_of
from optimus_jax.schedule.dataflow import (
    LLM,
    Dataflow,
    Payload,
    Value,
    Values,
    is_kept,
    of_encoder,
    of_llm,
)
from optimus_jax.schedule.program import EncoderSlots, Program, Slots, alphabet
from optimus_jax.schedule.task import Kind, Pipeline, Schedule, ScheduleError, Task

BUCKET = 32  # ticks of a Program are a multiple of it
ROWS = 4  # and rows of prologue and epilogue of this


@dataclasses.dataclass
class Tick:
    """One task for each device that has one, then one exchange over some links of one class."""

    tasks: dict[int, Task]
    payload: Payload = LLM
    links: dict[tuple[int, int], list[Value]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Layout:
    """Ticks, and by device the tasks before the first and after the last one."""

    prologue: list[list[Task]]
    ticks: list[Tick]
    epilogue: list[list[Task]]


def state_of_llm(task: Task, device: int, pipe: Pipeline) -> str:
    """What an LLM task keeps between F and B, in words."""
    return f"saved state of microbatch {task.microbatch} stage {task.chunk * pipe.stages + device}"


def state_of_encoder(task: Task, unit: int) -> str:
    """What an encoder stage keeps of a unit between EF and EB, in words."""
    encoder = f" of encoder {task.encoder}" if task.encoder else ""
    return f"saved state{encoder} of microbatch {task.microbatch} unit {unit}"


class _Pool:
    """Slots of one kind on one device, given out by liveness as a compiler gives out registers."""

    def __init__(self, kind: str, cap: int | None):
        self.kind, self.cap, self.size = kind, cap, 0
        self.free: list[int] = []
        self.at: dict[object, int] = {}

    def take(self, key: object, where: str) -> int:
        if not self.free:
            if self.size == self.cap:
                live = ", ".join(map(str, self.at))
                raise ScheduleError(
                    f"{where}: {key} needs {self.kind} slot {self.size + 1}, the plan has"
                    f" {self.cap}; live: {live}"
                )
            self.free.append(self.size)
            self.size += 1
        self.free.sort(reverse=True)
        self.at[key] = self.free.pop()
        return self.at[key]

    def held(self, key: object, where: str) -> int:
        if key not in self.at:
            raise ScheduleError(f"{where}: {key} is not on this device")
        return self.at[key]

    def drop(self, key: object) -> int:
        slot = self.at.pop(key)
        self.free.append(slot)
        return slot


class _Pools:
    """All slots of one device."""

    def __init__(self, caps: Slots | None, encoders: int):
        def pool(name: str, encoder: int = 0) -> _Pool:
            words = f"{name} (encoder {encoder})" if encoder else name
            return _Pool(words, caps.of(name, encoder) if caps else None)

        self.wire, self.saved = pool("wire"), pool("saved")
        self.feature = [pool("feature", k) for k in range(encoders)]
        self.hidden = [pool("hidden", k) for k in range(encoders)]
        self.encoder = [pool("encoder", k) for k in range(encoders)]

    def of(self, value: Value) -> _Pool:
        if value.is_feature:
            return self.feature[value.encoder]
        return self.hidden[value.encoder] if value.is_hidden else self.wire

    def need(self) -> Slots:
        kinds = zip(self.feature, self.hidden, self.encoder, strict=True)
        encoders = tuple(EncoderSlots(f.size, h.size, e.size) for f, h, e in kinds)
        return Slots(self.wire.size, self.saved.size, encoders)


def assign_slots(
    schedule: Schedule, layout: Layout, caps: Slots | None, bucket: int = BUCKET
) -> Program:
    """The tables of `layout`, its ticks padded with idle ones to a multiple of `bucket`.

    Raises ScheduleError, naming tick and device, if `caps` are too small.
    """
    writer = _Writer(schedule, caps)
    prologue = writer.rows("prologue row", layout.prologue)
    length = -(-len(layout.ticks) // bucket) * bucket
    table, pattern = writer.idle(length), np.zeros(length, np.int32)
    for t, tick in enumerate(layout.ticks):
        for device, task in tick.tasks.items():
            writer.task(table[t, device], task, device, f"tick {t} device {device}")
        pattern[t] = writer.exchange(table[t], tick, t)
    epilogue = writer.rows("epilogue row", layout.epilogue)
    need = Slots()
    for pools in writer.pools:
        need = need.covering(pools.need())
    return Program(schedule.pipeline, caps or need, table, pattern, prologue, epilogue)


class _Writer:
    """Writes rows in the order in which they run, and keeps account of the slots."""

    def __init__(self, schedule: Schedule, caps: Slots | None):
        self.pipe, self.flow = schedule.pipeline, Dataflow.of(schedule)
        self.at = columns_of(self.pipe)
        self.pools = [_Pools(caps, len(self.pipe.encoders)) for _ in range(self.pipe.stages)]

    def idle(self, rows: int) -> np.ndarray:
        row = self.at.idle_row()
        return np.broadcast_to(row, (rows, self.pipe.stages, len(row))).copy()

    def rows(self, name: str, tasks: list[list[Task]]) -> np.ndarray:
        """The rows before the first tick or after the last one."""
        count = max(map(len, tasks))
        table = self.idle(-(-count // ROWS) * ROWS)
        for device, mine in enumerate(tasks):
            for k, task in enumerate(mine):
                self.task(table[k, device], task, device, f"{name} {k} device {device}")
        return table

    def exchange(self, rows: np.ndarray, tick: Tick, number: int) -> int:
        """Writes what moves at a tick and returns the number of the pattern."""
        arrivals: list[tuple[int, str, int | None, Value]] = []
        for pair, values in tick.links.items():
            sent: dict[int, int] = defaultdict(int)
            for value in values:
                sender = self.flow.producer[value][0]
                receiver = pair[1] if sender == pair[0] else pair[0]
                of_units = value.payload != LLM
                k = sent[sender] if of_units else None
                sent[sender] += 1
                slot = self.pools[sender].of(value).drop(value)
                self._set(rows[sender], "e_send" if of_units else "send", k, slot)
                arrivals.append((receiver, "e_receive" if of_units else "receive", k, value))
        for receiver, name, k, value in arrivals:
            where = f"tick {number} device {receiver}"
            slot = self.pools[receiver].of(value).take(value, where)
            self._set(rows[receiver], name, k, slot)
        return pattern_of(tick, self.pipe)

    def task(self, row: np.ndarray, task: Task, device: int, where: str) -> None:
        """Writes the columns of one task; inputs die only after outputs have got their slots."""
        pools, gone = self.pools[device], list[tuple[_Pool, object]]()
        if task.llm_part:
            gone += self._llm(row, task.llm_part, device, pools, where)
        if task.encoder_part:
            gone += self._encoder(row, task.encoder_part, device, pools, where)
        for pool, key in gone:
            pool.drop(key)

    def _llm(
        self, row: np.ndarray, task: Task, device: int, pools: _Pools, where: str
    ) -> list[tuple[_Pool, object]]:
        pipe, at = self.pipe, self.at
        v = task.chunk * pipe.stages + device
        row[at["kind"]], row[at["microbatch"]] = KINDS[task.kind], task.microbatch
        row[at["chunk"]], row[at["layers"]] = task.chunk, pipe.llm_layers[v]
        row[at["first"]], row[at["last"]] = v == pipe.first_stage, v == pipe.virtual_stages - 1
        key = state_of_llm(task, device, pipe)
        if task.kind == Kind.F:
            pools.saved.take(key, where)
        row[at["saved"]] = pools.saved.held(key, f"{where}: {task}")
        reads, writes = of_llm(task, device, pipe, self.flow.encoded)
        self._values(row, reads, writes, pools, where)
        gone: list[tuple[_Pool, object]] = [(pools.of(value), value) for value in reads]
        return [*gone, (pools.saved, key)] if task.kind == Kind.B else gone

    def _encoder(
        self, row: np.ndarray, task: Task, device: int, pools: _Pools, where: str
    ) -> list[tuple[_Pool, object]]:
        pipe, at = self.pipe, self.at
        first, last = pipe.stage_layers(task.encoder, device)
        begin, end = pipe.layers_of(task, device)
        if not first <= begin < end <= last:
            raise ScheduleError(f"{where}: {task}, but the device has layers {first} to {last}")
        units = pipe.units_of(task)
        row[at["e_kind"]], row[at["encoder"]] = KINDS[task.kind], task.encoder
        row[at["e_microbatch"]], row[at["count"]] = task.microbatch, len(units)
        row[at["begin"]], row[at["end"]] = begin - first, end - first
        row[at["embeds"]] = begin == 0
        row[at["projects"]] = end == pipe.encoders[task.encoder].total
        saved, gone = pools.encoder[task.encoder], list[tuple[_Pool, object]]()
        for k, unit in enumerate(units):
            key = state_of_encoder(task, unit)
            self._set(row, "unit", k, unit)
            if task.kind == Kind.EF and begin == first:
                saved.take(key, where)
            self._set(row, "e_saved", k, saved.held(key, f"{where}: {task}"))
            if task.kind == Kind.EB and begin == first:
                gone.append((saved, key))
        reads, writes = (
            tuple(v for v in values if not is_kept(v, pipe))
            for values in of_encoder(task, device, pipe)
        )
        self._values(row, reads, writes, pools, where, "e_")
        return gone + [(pools.of(value), value) for value in reads]

    def _values(
        self,
        row: np.ndarray,
        reads: Values,
        writes: Values,
        pools: _Pools,
        where: str,
        prefix: str = "",
    ) -> None:
        for name, values in (("read", reads), ("write", writes)):
            for k, value in enumerate(values):
                pool = pools.of(value)
                slot = pool.at[value] if name == "read" else pool.take(value, where)
                if prefix:
                    self._set(row, prefix + name, k, slot)
                elif value.is_feature:
                    self._set(row, "feature", k, slot)
                else:
                    self._set(row, name, None, slot)

    def _set(self, row: np.ndarray, name: str, k: int | None, number: int) -> None:
        where = self.at[name]
        if k is None:
            row[where] = number
        else:
            assert isinstance(where, slice)
            row[where.start + k] = number


def pattern_of(tick: Tick, pipe: Pipeline) -> int:
    """Index of the smallest pattern with all links of the tick; ScheduleError if none has."""
    if not tick.links:
        return 0
    fitting = [
        (len(pattern.links), k)
        for k, pattern in enumerate(alphabet(pipe))
        if pattern.payload == tick.payload and tick.links.keys() <= pattern.links
    ]
    if not fitting:
        raise ScheduleError(
            f"no exchange pattern has the links {sorted(tick.links)} of {tick.payload}"
        )
    return min(fitting)[1]
