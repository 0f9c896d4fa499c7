"""Which values tasks read and write. A value has one producer and at most one consumer."""

from __future__ import annotations

import enum
from typing import NamedTuple

from optimus_jax.schedule.task import Kind, Orders, Pipeline, Schedule, ScheduleError, Task


class Content(enum.StrEnum):
    """What a value holds."""

    ACTIVATION = "activation"  # input of virtual stage `place`
    GRADIENT = "gradient"  # loss gradient of the output of virtual stage `place`
    FEATURE = "feature"  # projected features of unit `place`
    FEATURE_GRADIENT = "feature gradient"  # loss gradient of the features of unit `place`
    HIDDEN = "hidden"  # output of encoder layer `layer` - 1 of unit `place`
    HIDDEN_GRADIENT = "hidden gradient"  # loss gradient of the same


class Payload(NamedTuple):
    """What one exchange moves: values of the LLM ("llm"), or an encoder's features ("feature") or
    hidden states between its stages ("hidden"), and their gradients the other way."""

    content: str
    encoder: int = 0

    def __str__(self) -> str:
        return f"{self.content}{f' of encoder {self.encoder}' if self.encoder else ''}"


LLM = Payload("llm")


class Value(NamedTuple):
    content: Content
    microbatch: int
    place: int
    layer: int = 0
    encoder: int = 0

    @property
    def is_feature(self) -> bool:
        return self.content in (Content.FEATURE, Content.FEATURE_GRADIENT)

    @property
    def is_hidden(self) -> bool:
        return self.content in (Content.HIDDEN, Content.HIDDEN_GRADIENT)

    @property
    def payload(self) -> Payload:
        """The class of exchanges that can move it."""
        if self.is_feature:
            return Payload("feature", self.encoder)
        return Payload("hidden", self.encoder) if self.is_hidden else LLM

    def __str__(self) -> str:
        place = f"unit {self.place}" if self.is_feature or self.is_hidden else f"stage {self.place}"
        layer = f" layer {self.layer}" if self.is_hidden else ""
        encoder = f" of encoder {self.encoder}" if self.encoder else ""
        return f"{self.content}{encoder} of microbatch {self.microbatch} {place}{layer}"


Values = tuple[Value, ...]


def is_kept(value: Value, pipe: Pipeline) -> bool:
    """Whether a value lives in the saved state of its encoder unit: a hidden state inside a stage.
    One between two stages moves."""
    if not value.is_hidden:
        return False
    layers, first = pipe.encoders[value.encoder].layers, 0
    for n in layers:
        first += n
        if value.layer <= first:
            return value.layer < first
    return True


def reads_and_writes(
    task: Task, device: int, pipe: Pipeline, encoded: frozenset[int]
) -> tuple[Values, Values]:
    """Values that `task` consumes and produces when it runs on `device`.

    `encoded` are the microbatches with encoder work; the first stage's F of the others reads
    nothing. The last virtual stage's F computes the loss and writes the gradient of its own output.
    A fused task reads and writes what both its parts do, those of the LLM first.
    """
    if task.kind.is_encoder:
        return of_encoder(task, device, pipe)
    reads, writes = of_llm(task, device, pipe, encoded)
    if task.inside:
        more = of_encoder(task.inside, device, pipe)
        return reads + more[0], writes + more[1]
    return reads, writes


def of_encoder(task: Task, device: int, pipe: Pipeline) -> tuple[Values, Values]:
    """What an encoder task reads and writes, also inside a stage."""
    i, k = task.microbatch, task.encoder
    units, (first, end) = pipe.units_of(task), pipe.layers_of(task, device)
    if task.kind == Kind.EF:
        inner, outer = Content.HIDDEN, Content.FEATURE
    else:
        inner, outer = Content.HIDDEN_GRADIENT, Content.FEATURE_GRADIENT
    if end == pipe.encoders[k].total:
        above = tuple(Value(outer, i, u, 0, k) for u in units)
    else:
        above = tuple(Value(inner, i, u, end, k) for u in units)
    below = tuple(Value(inner, i, u, first, k) for u in units) if first else ()
    return (below, above) if task.kind == Kind.EF else (above, below)


def of_llm(
    task: Task, device: int, pipe: Pipeline, encoded: frozenset[int]
) -> tuple[Values, Values]:
    """What an LLM task reads and writes."""
    i, v, last = task.microbatch, task.chunk * pipe.stages + device, pipe.virtual_stages - 1

    def features(content: Content) -> Values:
        return tuple(
            Value(content, i, u, 0, k)
            for k, encoder in enumerate(pipe.encoders if i in encoded else ())
            for u in range(encoder.units)
        )

    first = v == pipe.first_stage
    if task.kind == Kind.F:
        taken = features(Content.FEATURE) if first else (Value(Content.ACTIVATION, i, v),)
        made = Value(Content.GRADIENT, i, v) if v == last else Value(Content.ACTIVATION, i, v + 1)
        return taken, (made,)
    given = features(Content.FEATURE_GRADIENT) if first else (Value(Content.GRADIENT, i, v - 1),)
    return (Value(Content.GRADIENT, i, v),), given


class Dataflow:
    """Producer and consumer of every value of some orders of tasks.

    Tasks can be added and removed, so that a scheduler can build its orders step by step; `check`
    says whether the whole is sound.
    """

    def __init__(self, pipe: Pipeline, orders: Orders, encoded: frozenset[int]):
        self.pipe, self.encoded = pipe, encoded
        self.io: dict[tuple[int, Task], tuple[Values, Values]] = {}
        self.producer: dict[Value, tuple[int, Task]] = {}
        self.consumer: dict[Value, tuple[int, Task]] = {}
        for device, order in enumerate(orders):
            for task in order:
                self.add(device, task)

    @classmethod
    def of(cls, schedule: Schedule) -> Dataflow:
        """The dataflow of a whole schedule, checked."""
        flow = cls(schedule.pipeline, schedule.orders, schedule.encoded)
        flow.check()
        return flow

    def add(self, device: int, task: Task) -> None:
        """Raises ScheduleError if a value would be made twice or read twice."""
        reads, writes = reads_and_writes(task, device, self.pipe, self.encoded)
        self.io[device, task] = reads, writes
        for verb, role, values in (
            ("read", self.consumer, reads),
            ("made", self.producer, writes),
        ):
            for value in values:
                if value in role:
                    other, twin = role[value]
                    raise ScheduleError(
                        f"{value} is {verb} twice: by {twin} on device {other}"
                        f" and by {task} on device {device}"
                    )
                role[value] = device, task

    def remove(self, device: int, task: Task) -> None:
        reads, writes = self.io.pop((device, task))
        for value in reads:
            del self.consumer[value]
        for value in writes:
            del self.producer[value]

    def check(self) -> None:
        """Raises ScheduleError if a value is read but never made, or would have to move and
        cannot."""
        for value, (device, task) in self.consumer.items():
            if value not in self.producer:
                raise ScheduleError(f"{task} on device {device} reads {value}: nothing makes it")
            other, maker = self.producer[value]
            if not value.is_hidden:
                continue
            if is_kept(value, self.pipe):
                if other != device:
                    raise ScheduleError(
                        f"{task} on device {device} continues {maker} of device {other}:"
                        " an encoder unit stays on its device"
                    )
            elif abs(other - device) != 1 or not self._one_pipeline(value, device, other):
                raise ScheduleError(
                    f"{task} on device {device} continues {maker} of device {other}:"
                    " an encoder unit stays in its pipeline"
                )

    def _one_pipeline(self, value: Value, device: int, other: int) -> bool:
        of = self.pipe.pipeline_of
        return of(value.encoder, device) == of(value.encoder, other)

    def moves(self, value: Value) -> bool:
        """Whether `value` is consumed on another device than it is produced on."""
        consumer = self.consumer.get(value)
        return consumer is not None and consumer[0] != self.producer[value][0]
