"""What runs when, as values: Pipeline (sizes) and Schedule; Task is in notation.py."""

from __future__ import annotations

import dataclasses
import functools

from optimus_jax.schedule.notation import Kind as Kind
from optimus_jax.schedule.notation import ScheduleError as ScheduleError
from optimus_jax.schedule.notation import Task as Task


@dataclasses.dataclass(frozen=True)
class EncoderPipeline:
    """Sizes of the pipelines of one encoder.

    `layers` of each stage; their number divides the LLM's stages. With fewer encoder layers than
    stages the last ones have none (of one single pipeline, for the method `balanced`). A
    microbatch's pictures are cut into `units` equal units, 0 standing for as many as there are
    pipelines, so that all can share one microbatch.
    """

    layers: tuple[int, ...] = (1,)
    units: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        filled = self.layers[: self.last + 1] if any(self.layers) else ()
        if not filled or min(self.layers) < 0 or 0 in filled or self.units < 0:
            raise ScheduleError(
                "sizes of an encoder must be positive; only its last stages may have no layers:"
                f" got {self}"
            )

    @property
    def stages(self) -> int:
        return len(self.layers)

    @property
    def total(self) -> int:
        """Layers of the whole encoder."""
        return sum(self.layers)

    @property
    def last(self) -> int:
        """The last stage that has layers: there the projector stands."""
        return max((s for s, n in enumerate(self.layers) if n), default=0)

    def first_layer(self, stage: int) -> int:
        """Number of a stage's first layer in the whole encoder."""
        return sum(self.layers[:stage])


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Sizes of one LLM pipeline and of the encoder pipelines on its devices.

    Virtual stage v = chunk * stages + stage holds `llm_layers[v]` layers and runs on device
    v % stages. The first ones may have none: the LLM then begins at `first_stage`, on the device
    `entry`, where the features are needed. Pipeline j of an encoder with p stages takes devices
    j * p to j * p + p - 1; any pipeline may run any unit. `cap` > 0: a device keeps saved state of
    at most its pipeline's even share of the units of so many microbatches, for each encoder.
    """

    stages: int
    microbatches: int
    chunks: int = 1
    llm_layers: tuple[int, ...] = ()  # () stands for one layer in each virtual stage
    encoders: tuple[EncoderPipeline, ...] = (EncoderPipeline(),)
    cap: int = 0

    def __post_init__(self) -> None:
        sizes = (self.stages, self.microbatches, self.chunks)
        if min(sizes) < 1 or min(self.llm_layers, default=0) < 0 or self.cap < 0:
            raise ScheduleError(f"sizes of a pipeline must be positive, got {self}")
        layers = tuple(self.llm_layers) or (1,) * self.virtual_stages
        object.__setattr__(self, "llm_layers", layers)
        if len(layers) != self.virtual_stages:
            raise ScheduleError(
                f"{len(layers)} layer counts for {self.virtual_stages} virtual stages"
                f" ({self.stages} stages x {self.chunks} chunks)"
            )
        if not any(layers):
            raise ScheduleError(f"the LLM has no layers: {layers}")
        encoders = []
        for k, encoder in enumerate(self.encoders):
            if self.stages % encoder.stages:
                near = [n for n in range(1, self.stages + 1) if not self.stages % n]
                raise ScheduleError(
                    f"encoder {k} has {encoder.stages} stages, which do not divide the LLM's"
                    f" {self.stages}; {', '.join(map(str, near))} would"
                )
            units = encoder.units or self.stages // encoder.stages
            encoders.append(dataclasses.replace(encoder, units=units))
        object.__setattr__(self, "encoders", tuple(encoders))

    @property
    def virtual_stages(self) -> int:
        return self.stages * self.chunks

    @functools.cached_property
    def first_stage(self) -> int:
        """The first virtual stage with layers."""
        return next(v for v, n in enumerate(self.llm_layers) if n)

    @property
    def entry(self) -> int:
        """The device on which the LLM begins: there the features are needed."""
        return self.first_stage % self.stages

    def runs(self, device: int, chunk: int) -> bool:
        """Whether the LLM has work there."""
        return chunk * self.stages + device >= self.first_stage

    def pipelines(self, encoder: int) -> int:
        """How many pipelines an encoder has."""
        return self.stages // self.encoders[encoder].stages

    def devices_of(self, encoder: int, pipeline: int) -> range:
        """The devices of one of an encoder's pipelines, in the order of its stages, without those
        that have no layers."""
        first = pipeline * self.encoders[encoder].stages
        return range(first, first + self.encoders[encoder].last + 1)

    def pipeline_of(self, encoder: int, device: int) -> int:
        """The encoder's pipeline that a device belongs to."""
        return device // self.encoders[encoder].stages

    def stage_layers(self, encoder: int, device: int) -> tuple[int, int]:
        """The layers [first, end) of an encoder that a device holds."""
        sizes = self.encoders[encoder]
        stage = device % sizes.stages
        first = sizes.first_layer(stage)
        return first, first + sizes.layers[stage]

    def units_of(self, task: Task) -> tuple[int, ...]:
        """The units that an encoder task covers, written out."""
        return task.units or tuple(range(self.encoders[task.encoder].units))

    def layers_of(self, task: Task, device: int) -> tuple[int, int]:
        """The encoder layers [first, end) that an encoder task on a device covers, written out."""
        return task.layers or self.stage_layers(task.encoder, device)

    def units_cap(self, encoder: int) -> int | None:
        """Of how many units a device may hold saved state at once; None without a cap."""
        if not self.cap:
            return None
        return -(-self.cap * self.encoders[encoder].units // self.pipelines(encoder))

    def short(self, task: Task, device: int) -> Task:
        """The task as it is written short: all units as (), all layers as None."""
        if task.inside:
            return dataclasses.replace(task, inside=self.short(task.inside, device))
        if not task.kind.is_encoder:
            return task
        whole = task.units == tuple(range(self.encoders[task.encoder].units))
        every = task.layers == self.stage_layers(task.encoder, device)
        return dataclasses.replace(
            task,
            units=() if whole else task.units,
            layers=None if every else task.layers,
        )


Orders = tuple[tuple[Task, ...], ...]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The tasks of each device in the order in which it runs them; no times.

    Written as one line for each device:

        0: EF0 F0 F1 B0 B1 EB0
        1: EF1 F0 B0 F1 B1 EB1
    """

    pipeline: Pipeline
    orders: Orders

    def __str__(self) -> str:
        lines = (f"{d}: {' '.join(map(str, order))}" for d, order in enumerate(self.orders))
        return "\n".join(lines)

    @classmethod
    def parse(cls, text: str, pipeline: Pipeline) -> Schedule:
        """The schedule that prints as `text`. Raises ScheduleError where a line does not fit."""
        orders: list[tuple[Task, ...]] = []
        for line in filter(None, map(str.strip, text.splitlines())):
            device, colon, tasks = line.partition(":")
            if not colon or device.strip() != str(len(orders)):
                raise ScheduleError(f"expected '{len(orders)}: tasks ...', got {line!r}")
            orders.append(tuple(map(Task.parse, tasks.split())))
        return cls(pipeline, tuple(orders))

    @functools.cached_property
    def encoded(self) -> frozenset[int]:
        """Microbatches whose images are encoded; the others get features of zero."""
        parts = (task.encoder_part for order in self.orders for task in order)
        return frozenset(part.microbatch for part in parts if part and part.kind == Kind.EF)
