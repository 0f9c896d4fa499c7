"""From a placement to a Program, in two passes: exchanges into ticks, values into slots."""

from __future__ import annotations

import dataclasses

import numpy as np

from optimus_jax.schedule.dataflow import Dataflow, Value
from optimus_jax.schedule.exchange import Placement, place_exchanges
from optimus_jax.schedule.program import KINDS, Columns, Pattern, Program, Slots, alphabet
from optimus_jax.schedule.simulate import Durations, Exchange
from optimus_jax.schedule.task import Kind, Pipeline, Schedule, ScheduleError, Task

BUCKET = 32  # ticks of a Program are a multiple of it


@dataclasses.dataclass
class Tick:
    """One task for each device that has one, then one exchange over some links of one class."""

    tasks: dict[int, Task]
    features: bool = False
    links: dict[tuple[int, int], list[Value]] = dataclasses.field(default_factory=dict)


def lower(
    schedule: Schedule, durations: Durations, slots: Slots | None = None, bucket: int = BUCKET
) -> Program:
    """The Program of a schedule. `slots` are the plan's caps; without them it gets what it needs.

    Raises ScheduleError, naming tick and device, if the caps are too small.
    """
    ticks = to_ticks(place_exchanges(schedule, durations), durations)
    return assign_slots(schedule, ticks, slots, bucket)


def to_ticks(placement: Placement, durations: Durations) -> list[Tick]:
    """Numbers tasks and exchanges by ticks in order of time, as early as each device allows. The
    exchanges of one tick fit one pattern of the alphabet; what does not fit takes a later tick."""
    pipe = placement.schedule.pipeline
    patterns = alphabet(pipe)
    timing = placement.timing(durations)
    task_at, exchange_at = [-1] * pipe.stages, [-1] * pipe.stages
    ticks: list[Tick] = []

    def tick(number: int) -> Tick:
        while len(ticks) <= number:
            ticks.append(Tick({}))
        return ticks[number]

    seen: set[int] = set()
    for device, item, _, _ in timing.log:
        if isinstance(item, Task):
            task_at[device] = max(task_at[device], exchange_at[device]) + 1
            tick(task_at[device]).tasks[device] = item
            continue
        if id(item) in seen:
            continue
        seen.add(id(item))
        number = max(max(task_at[d], exchange_at[d] + 1) for d in item.pair)
        while not _fits(tick(number), item, patterns):
            number += 1
        tick(number).features = item.features
        tick(number).links[item.pair] = item.values
        for d in item.pair:
            exchange_at[d] = number
    return _whole_patterns(ticks, pipe, durations, timing.end)


def _fits(tick: Tick, exchange: Exchange, patterns: tuple[Pattern, ...]) -> bool:
    if not tick.links:
        return True
    links = {*tick.links, exchange.pair}
    return tick.features == exchange.features and any(
        pattern.features == tick.features and links <= pattern.links for pattern in patterns
    )


def _pattern(tick: Tick, pipe: Pipeline) -> int:
    """Index of the smallest pattern with all links of the tick; ScheduleError if none has."""
    patterns = alphabet(pipe)
    fitting = [
        (len(pattern.links), k)
        for k, pattern in enumerate(patterns)
        if tick.links.keys() <= pattern.links
        and (pattern.features == tick.features or not tick.links)
    ]
    if not fitting:
        raise ScheduleError(f"no exchange pattern has the links {sorted(tick.links)}")
    return min(fitting)[1]


def _whole_patterns(
    ticks: list[Tick], pipe: Pipeline, durations: Durations, end: float
) -> list[Tick]:
    """Splits a tick that uses only part of a pattern into single links, each in a tick of its own,
    unless the unused links make nobody wait: their devices would meet for nothing."""
    sets = {(p.features, p.links) for p in alphabet(pipe)}

    def is_whole(tick: Tick) -> bool:
        return not tick.links or (tick.features, frozenset(tick.links)) in sets

    def split(kept: set[int]) -> list[Tick]:
        out = []
        for k, tick in enumerate(ticks):
            if is_whole(tick) or k in kept:
                out.append(tick)
                continue
            for n, (pair, values) in enumerate(tick.links.items()):
                out.append(Tick(tick.tasks if n == 0 else {}, tick.features, {pair: values}))
        return out

    kept: set[int] = set()
    for k, tick in enumerate(ticks):
        if not is_whole(tick) and _time(split(kept | {k}), pipe, durations) <= end + 1e-9:
            kept.add(k)
    return split(kept)


def _time(ticks: list[Tick], pipe: Pipeline, durations: Durations) -> float:
    """As Program.time, before slots are assigned."""
    clock, patterns = [0.0] * pipe.stages, alphabet(pipe)
    for tick in ticks:
        for device, task in tick.tasks.items():
            clock[device] += durations.of(task, device, pipe)
        if tick.links:
            for a, b in patterns[_pattern(tick, pipe)].links:
                clock[a] = clock[b] = max(clock[a], clock[b]) + durations.travel(tick.features)
    return max(clock)


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

    def __init__(self, caps: Slots | None):
        for kind in ("wire", "feature", "saved", "encoder"):
            setattr(self, kind, _Pool(kind, getattr(caps, kind) if caps else None))

    wire: _Pool
    feature: _Pool
    saved: _Pool
    encoder: _Pool

    def of(self, value: Value) -> _Pool:
        return self.feature if value.is_feature else self.wire

    def need(self) -> Slots:
        return Slots(self.wire.size, self.feature.size, self.saved.size, self.encoder.size)


def assign_slots(
    schedule: Schedule, ticks: list[Tick], caps: Slots | None, bucket: int = BUCKET
) -> Program:
    """The tables of `ticks`, padded with idle ticks to a multiple of `bucket`.

    Raises ScheduleError, naming tick and device, if `caps` are too small.
    """
    pipe, flow, at = schedule.pipeline, Dataflow.of(schedule), Columns(schedule.pipeline.units)
    length = -(-len(ticks) // bucket) * bucket
    table = np.broadcast_to(at.idle_row(), (length, pipe.stages, at.width)).copy()
    pattern = np.zeros(length, np.int32)
    pools = [_Pools(caps) for _ in range(pipe.stages)]
    for t, tick in enumerate(ticks):
        for device, task in tick.tasks.items():
            _fill_task(
                table[t, device], task, device, flow, pools[device], f"tick {t} device {device}"
            )
        pattern[t] = _pattern(tick, pipe)
        arrivals: list[tuple[int, str, int | None, Value]] = []
        for pair, values in tick.links.items():
            sent = {d: 0 for d in pair}
            for value in values:
                sender = flow.producer[value][0]
                receiver = pair[1] if sender == pair[0] else pair[0]
                k = sent[sender] if value.is_feature else None
                sent[sender] += 1
                name = "feature_send" if value.is_feature else "send"
                _set(table[t, sender], at, name, k, pools[sender].of(value).drop(value))
                name = "feature_receive" if value.is_feature else "receive"
                arrivals.append((receiver, name, k, value))
        for receiver, name, k, value in arrivals:
            slot = pools[receiver].of(value).take(value, f"tick {t} device {receiver}")
            _set(table[t, receiver], at, name, k, slot)
    need = Slots()
    for pool in pools:
        need = need.covering(pool.need())
    return Program(pipe, caps or need, table, pattern)


def _set(row: np.ndarray, at: Columns, name: str, k: int | None, number: int) -> None:
    where = at[name]
    if k is None:
        row[where] = number
    else:
        assert isinstance(where, slice)
        row[where.start + k] = number


def _fill_task(
    row: np.ndarray, task: Task, device: int, flow: Dataflow, pools: _Pools, where: str
) -> None:
    """Writes the columns of one task; inputs die only after outputs have got their slots."""
    pipe, at = flow.pipe, Columns(flow.pipe.units)
    reads, writes = flow.io[device, task]
    row[at["kind"]], row[at["microbatch"]] = KINDS[task.kind], task.microbatch
    if task.kind.is_encoder:
        units = pipe.units_of(task)
        row[at["count"]] = len(units)
        row[at["begin"]], row[at["end"]] = begin, _ = pipe.layers_of(task)
        for k, unit in enumerate(units):
            key = f"saved state of microbatch {task.microbatch} unit {unit}"
            _set(row, at, "unit", k, unit)
            if task.kind == Kind.EF and begin == 0:
                pools.encoder.take(key, where)
            _set(row, at, "encoder", k, pools.encoder.held(key, f"{where}: {task}"))
    else:
        v = task.chunk * pipe.stages + device
        row[at["chunk"]], row[at["layers"]] = task.chunk, pipe.llm_layers[v]
        row[at["first"]], row[at["last"]] = v == 0, v == pipe.virtual_stages - 1
        key = f"saved state of microbatch {task.microbatch} stage {v}"
        if task.kind == Kind.F:
            pools.saved.take(key, where)
        row[at["saved"]] = pools.saved.held(key, f"{where}: {task}")
    for name, values in (("read", reads), ("write", writes)):
        kept = [value for value in values if not value.is_hidden]
        for k, value in enumerate(kept):
            pool = pools.of(value)
            slot = pool.at[value] if name == "read" else pool.take(value, where)
            column = "feature" if value.is_feature else name
            _set(row, at, column, k if value.is_feature else None, slot)
    for value in reads:
        if not value.is_hidden:
            pools.of(value).drop(value)
    if task.kind == Kind.B:
        pools.saved.drop(key)
    if task.kind == Kind.EB and not begin:
        for unit in units:
            pools.encoder.drop(f"saved state of microbatch {task.microbatch} unit {unit}")
