"""When things happen: the time of task sequences under both timing rules.

Event-driven: a task starts when its device is free and its inputs have arrived; values travel by
themselves (asynchronous P2P, as in Megatron-LM). Rendezvous: a value moves in an Exchange, at which
both devices are present; so runs a Program. Both are the same simulation: values named in an
exchange wait for it, all others travel by themselves.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from optimus_jax.schedule.dataflow import Dataflow, Payload, Value, is_kept
from optimus_jax.schedule.durations import Durations as Durations
from optimus_jax.schedule.durations import EncoderDurations as EncoderDurations
from optimus_jax.schedule.task import Kind, Schedule, ScheduleError, Task


@dataclasses.dataclass(eq=False)
class Exchange:
    """A meeting of two devices, at which values of one payload class move, both ways.

    Identity matters: the same object stands in the sequences of both devices.
    """

    pair: tuple[int, int]
    payload: Payload
    values: list[Value] = dataclasses.field(default_factory=list)

    def other(self, device: int) -> int:
        return self.pair[1] if device == self.pair[0] else self.pair[0]

    def __str__(self) -> str:
        moved = ", ".join(map(str, self.values))
        return f"exchange {self.pair[0]}-{self.pair[1]} of {moved}"


Item = Task | Exchange
Interval = tuple[float, float]


class Beside(NamedTuple):
    """By device, which items of its sequence run beside the collectives over replicas: the first
    `ahead` beside the gathering of weights, those from `behind` on beside the scattering of
    gradients."""

    ahead: list[int]
    behind: list[int]

    @classmethod
    def of(
        cls, sequences: Sequence[Sequence[Item]], flow: Dataflow, durations: Durations
    ) -> Beside:
        """Encoder forwards at the start that read nothing from another device, as many as fit the
        gathering; encoder backwards at the end that send nothing, as many as fit the scattering."""
        both = []
        for limit, kind, side in (
            (durations.gather, Kind.EF, 0),
            (durations.scatter, Kind.EB, 1),
        ):
            counts = []
            for device, sequence in enumerate(sequences):
                count, time = 0, 0.0
                for item in reversed(sequence) if side else sequence:
                    if not limit or not isinstance(item, Task) or item.kind != kind:
                        break
                    time += durations.of(item, device, flow.pipe)
                    across = (v for v in flow.io[device, item][side] if v.is_hidden)
                    moved = not all(is_kept(v, flow.pipe) for v in across)
                    if moved or time > limit + 1e-9:
                        break
                    count += 1
                counts.append(count)
            both.append(counts)
        behind = [len(s) - n for s, n in zip(sequences, both[1], strict=True)]
        return cls(both[0], [max(b, a) for a, b in zip(both[0], behind, strict=True)])


@dataclasses.dataclass
class Timing:
    """Start and end of every item of every device's sequence, and the items in order of time."""

    intervals: list[list[Interval]]
    log: list[tuple[int, Item, float, float]]  # (device, item, start, end); causes before effects
    end: float
    beside: Beside


def simulate(sequences: Sequence[Sequence[Item]], flow: Dataflow, durations: Durations) -> Timing:
    """The time of `sequences`, which hold the tasks of `flow` and any exchanges.

    A value whose producer is not in the sequences counts as there from the start. The collectives
    over replicas stand around each device's items, or beside the first and last (see `Beside`).
    Raises ScheduleError naming the waiting tasks and devices if they wait for one another.
    """
    count = len(sequences)
    moved = {v for s in sequences for x in s if isinstance(x, Exchange) for v in x.values}
    arrival: dict[Value, float] = {}
    waiting: dict[object, set[int]] = defaultdict(set)
    beside = Beside.of(sequences, flow, durations)
    ahead, behind = beside
    gather, scatter, overlap = durations.gather, durations.scatter, durations.overlap
    clock, at = [0.0 if overlap and n else gather for n in ahead], [0] * count
    scattered = [time + scatter for time in clock]
    intervals: list[list[Interval]] = [[] for _ in sequences]
    events: list[tuple[float, int, int, Item, float]] = []

    def try_task(device: int, task: Task) -> list[int] | None:
        """Runs the task if its inputs are there and returns the devices to look at again."""
        reads, writes = flow.io[device, task]
        start = clock[device]
        for value in reads:
            if value in moved:
                continue
            if value not in arrival:
                if value not in flow.producer:
                    continue
                waiting[value].add(device)
                return None
            moves = flow.producer[value][0] != device
            travel = durations.travel(value.payload) if moves else 0.0
            start = max(start, arrival[value] + travel)
        end = start + durations.of(task, device, flow.pipe)
        advance(device, task, start, end)
        woken: list[int] = []
        for value in writes:
            arrival[value] = end
            woken += waiting.pop(value, ())
        return woken

    def try_exchange(device: int, exchange: Exchange) -> list[int] | None:
        other = exchange.other(device)
        if at[other] == len(sequences[other]) or sequences[other][at[other]] is not exchange:
            waiting[exchange].add(device)
            return None
        start = max(clock[device], clock[other])
        for d in exchange.pair:
            advance(d, exchange, start, start + durations.travel(exchange.payload))
        return [other]

    def advance(device: int, item: Item, start: float, end: float) -> None:
        at[device] += 1
        clock[device] = max(end, gather) if at[device] == ahead[device] else end
        if at[device] == behind[device]:
            scattered[device] = clock[device] + scatter
        intervals[device].append((start, end))
        events.append((end, len(events), device, item, start))

    ready = list(range(count))
    while ready:
        device = ready.pop()
        while at[device] < len(sequences[device]):
            item = sequences[device][at[device]]
            if isinstance(item, Exchange):
                woken = try_exchange(device, item)
            else:
                woken = try_task(device, item)
            if woken is None:
                break
            ready += woken
    if any(at[d] < len(sequences[d]) for d in range(count)):
        raise ScheduleError(_stuck(sequences, at, flow, moved, arrival))
    log = [(device, item, start, end) for end, _, device, item, start in sorted(events)]
    if not overlap:
        scattered = [time + scatter for time in clock]
    return Timing(intervals, log, max(map(max, clock, scattered)), beside)


def _stuck(
    sequences: Sequence[Sequence[Item]],
    at: list[int],
    flow: Dataflow,
    moved: set[Value],
    arrival: dict[Value, float],
) -> str:
    """Follows who waits for whom from the first stuck device until a device comes up again."""
    device = next(d for d in range(len(sequences)) if at[d] < len(sequences[d]))
    path: list[tuple[int, str, str]] = []
    seen: dict[int, int] = {}
    while device not in seen:
        seen[device] = len(path)
        sequence, k = sequences[device], at[device]
        if k == len(sequence):
            path.append((device, "its end", "has nothing left to do"))
            break
        item = sequence[k]
        if isinstance(item, Exchange):
            before = next((x for x in sequence[k:] if isinstance(x, Task)), None)
            device_next, what = item.other(device), f"waits in the {item}"
        else:
            before = item
            value = next(v for v in flow.io[device, item][0] if v not in moved and v not in arrival)
            device_next, maker = flow.producer.get(value, (device, "nothing"))
            what = f"waits for {value} from {maker} on device {device_next}"
        path.append((device, str(before) if before else "its end", what))
        device = device_next
    cycle = path[seen.get(device, 0) :]
    steps = "; ".join(f"device {d} before {task} {what}" for d, task, what in cycle)
    return f"tasks wait for one another in a cycle: {steps}"


def event_driven(schedule: Schedule, durations: Durations) -> Timing:
    """The schedule under asynchronous transfers; ScheduleError on a cycle of dependencies."""
    return simulate(schedule.orders, Dataflow.of(schedule), durations)
