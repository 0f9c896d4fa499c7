"""When things happen: durations, and the time of task sequences under both timing rules.

Event-driven: a task starts when its device is free and its inputs have arrived; values travel by
themselves (asynchronous P2P, as in Megatron-LM). Rendezvous: a value moves in an Exchange, at which
both devices are present; so runs a Program. Both are the same simulation: values named in an
exchange wait for it, all others travel by themselves.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from optimus_jax.schedule.dataflow import Dataflow, Value
from optimus_jax.schedule.task import Kind, Pipeline, Schedule, ScheduleError, Task


@dataclasses.dataclass(frozen=True)
class Durations:
    """Seconds that tasks and transfers take.

    `forward`, `backward`: one entry for each virtual stage. `encoder_forward`, `encoder_backward`:
    one entry for each encoder layer, of one unit; the first includes the patch embedding, the last
    the projector. `transfer`: an exchange of LLM values; `feature_transfer`: one of features, the
    same if None. `epilogue`: gradient reduction and optimiser at the end of the step.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    encoder_forward: tuple[float, ...]
    encoder_backward: tuple[float, ...]
    transfer: float = 0.0
    epilogue: float = 0.0
    feature_transfer: float | None = None

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            if min(getattr(self, name), default=0.0) <= 0:
                raise ScheduleError(f"durations of {name} must be positive: {getattr(self, name)}")
        if min(self.transfer, self.epilogue, self.feature_transfer or 0.0) < 0:
            raise ScheduleError("transfers and epilogue must not take negative time")

    def travel(self, features: bool) -> float:
        """Seconds of an exchange of features, or of LLM values."""
        if features and self.feature_transfer is not None:
            return self.feature_transfer
        return self.transfer

    @classmethod
    def uniform(
        cls,
        pipe: Pipeline,
        forward: float = 1.0,
        backward: float = 2.0,
        encoder: float = 1.0,
        encoder_backward: float | None = None,
    ) -> Durations:
        """`forward` and `backward` of a whole stage, `encoder` of a whole microbatch of images;
        its backward defaults to `encoder` * `backward` / `forward`."""
        if encoder_backward is None:
            encoder_backward = encoder * backward / forward
        count, layers = pipe.virtual_stages, pipe.encoder_layers
        piece = 1 / (pipe.units * layers)
        return cls(
            (forward / pipe.chunks,) * count,
            (backward / pipe.chunks,) * count,
            (encoder * piece,) * layers,
            (encoder_backward * piece,) * layers,
        )

    def of(self, task: Task, device: int, pipe: Pipeline) -> float:
        """Seconds of `task` on `device`."""
        if task.kind == Kind.F:
            return self.forward[task.chunk * pipe.stages + device]
        if task.kind == Kind.B:
            return self.backward[task.chunk * pipe.stages + device]
        layers = self.encoder_forward if task.kind == Kind.EF else self.encoder_backward
        first, end = pipe.layers_of(task)
        if end > len(layers):
            raise ScheduleError(f"{task} runs {end} encoder layers, durations are of {len(layers)}")
        return sum(layers[first:end]) * len(pipe.units_of(task))


@dataclasses.dataclass(eq=False)
class Exchange:
    """A meeting of two devices, at which values of one payload class move, both ways.

    Identity matters: the same object stands in the sequences of both devices.
    """

    pair: tuple[int, int]
    features: bool
    values: list[Value] = dataclasses.field(default_factory=list)

    def other(self, device: int) -> int:
        return self.pair[1] if device == self.pair[0] else self.pair[0]

    def __str__(self) -> str:
        moved = ", ".join(map(str, self.values))
        return f"exchange {self.pair[0]}-{self.pair[1]} of {moved}"


Item = Task | Exchange
Interval = tuple[float, float]


@dataclasses.dataclass
class Timing:
    """Start and end of every item of every device's sequence, and the items in order of time."""

    intervals: list[list[Interval]]
    log: list[tuple[int, Item, float, float]]  # (device, item, start, end); causes before effects
    end: float


def simulate(sequences: Sequence[Sequence[Item]], flow: Dataflow, durations: Durations) -> Timing:
    """The time of `sequences`, which hold the tasks of `flow` and any exchanges.

    A value whose producer is not in the sequences counts as there from the start.
    Raises ScheduleError naming the waiting tasks and devices if they wait for one another.
    """
    count = len(sequences)
    moved = {v for s in sequences for x in s if isinstance(x, Exchange) for v in x.values}
    arrival: dict[Value, float] = {}
    waiting: dict[object, set[int]] = defaultdict(set)
    clock, at = [0.0] * count, [0] * count
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
            travel = durations.travel(value.is_feature) if moves else 0.0
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
            advance(d, exchange, start, start + durations.travel(exchange.features))
        return [other]

    def advance(device: int, item: Item, start: float, end: float) -> None:
        clock[device], at[device] = end, at[device] + 1
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
    return Timing(intervals, log, max(clock))


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
