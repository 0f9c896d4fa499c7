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
from typing import NamedTuple

from optimus_jax.schedule.dataflow import Dataflow, Payload, Value, is_kept
from optimus_jax.schedule.task import Kind, Pipeline, Schedule, ScheduleError, Task


@dataclasses.dataclass(frozen=True)
class EncoderDurations:
    """Seconds of one encoder's layers, one entry for each layer of the whole encoder, of one unit;
    the first includes the patch embedding, the last the projector. `feature_transfer` and
    `hidden_transfer`: an exchange of its features, and of what goes from one of its stages to the
    next; None stands for the `transfer` of LLM values."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    feature_transfer: float | None = None
    hidden_transfer: float | None = None


@dataclasses.dataclass(frozen=True)
class Durations:
    """Seconds that tasks and transfers take.

    `forward`, `backward`: one entry for each virtual stage, 0 for first ones without LLM layers.
    `transfer`: an exchange of LLM values. `epilogue`: the optimiser, and what else follows all
    tasks. `gather`, `scatter`: the collectives over replicas before a device's first LLM task and
    after its last one; if `overlap`, encoder tasks run beside them. `window`: how long the
    collectives inside one LLM layer's forward and backward keep the device waiting; there the
    layers of an encoder task inside the LLM task hide.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    encoders: tuple[EncoderDurations, ...] = ()
    transfer: float = 0.0
    epilogue: float = 0.0
    gather: float = 0.0
    scatter: float = 0.0
    overlap: bool = False
    window: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        empty = next((v for v, time in enumerate(self.forward) if time), len(self.forward))
        for name in ("forward", "backward"):
            times = getattr(self, name)
            if any(times[:empty]) or min(times[empty:], default=0.0) <= 0:
                raise ScheduleError(f"durations of {name} must be positive: {times}")
        moves = [t or 0.0 for e in self.encoders for t in (e.feature_transfer, e.hidden_transfer)]
        others = self.epilogue, self.gather, self.scatter, *self.window
        if min(self.transfer, *others, *moves) < 0:
            raise ScheduleError(
                "transfers, collectives, windows and epilogue must not take negative time"
            )

    def travel(self, payload: Payload) -> float:
        """Seconds of an exchange of a class."""
        if payload.content == "llm":
            return self.transfer
        encoder = self.encoders[payload.encoder]
        feature = payload.content == "feature"
        own = encoder.feature_transfer if feature else encoder.hidden_transfer
        return self.transfer if own is None else own

    @classmethod
    def uniform(
        cls,
        pipe: Pipeline,
        forward: float = 1.0,
        backward: float = 2.0,
        encoder: float = 1.0,
        encoder_backward: float | None = None,
    ) -> Durations:
        """`forward` and `backward` of a whole stage, `encoder` of a whole microbatch of images in
        each encoder; its backward defaults to `encoder` * `backward` / `forward`."""
        if encoder_backward is None:
            encoder_backward = encoder * backward / forward
        times = []
        for sizes in pipe.encoders:
            piece = 1 / (sizes.units * sizes.total)
            times.append(
                EncoderDurations(
                    (encoder * piece,) * sizes.total, (encoder_backward * piece,) * sizes.total
                )
            )
        runs = [float(v >= pipe.first_stage) for v in range(pipe.virtual_stages)]
        return cls(
            tuple(forward / pipe.chunks * r for r in runs),
            tuple(backward / pipe.chunks * r for r in runs),
            tuple(times),
        )

    def of(self, task: Task, device: int, pipe: Pipeline) -> float:
        """Seconds of `task` on `device`. Of a fused one: both its parts, less what hides in the
        windows of the LLM's layers, but never less than either part alone."""
        if task.kind == Kind.F:
            alone = self.forward[task.chunk * pipe.stages + device]
        elif task.kind == Kind.B:
            alone = self.backward[task.chunk * pipe.stages + device]
        else:
            return sum(self._layers(task, device, pipe)) * len(pipe.units_of(task))
        if not task.inside:
            return alone
        layers = self._layers(task.inside, device, pipe)
        window = self.window[task.kind == Kind.B]
        both = alone + sum(layers) - sum(min(window, layer) for layer in layers)
        return max(both, alone, sum(layers))

    def _layers(self, task: Task, device: int, pipe: Pipeline) -> tuple[float, ...]:
        """Seconds of each layer of an encoder task, of one unit."""
        times = self.encoders[task.encoder]
        layers = times.forward if task.kind == Kind.EF else times.backward
        first, end = pipe.layers_of(task, device)
        if end > len(layers):
            raise ScheduleError(f"{task} runs {end} encoder layers, durations are of {len(layers)}")
        return layers[first:end]


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
