"""What runs when, as values: Task, Pipeline, Schedule, and the notation they are written in."""

from __future__ import annotations

import dataclasses
import enum
import functools
import re


class ScheduleError(ValueError):
    """A schedule, placement or program that cannot run; the message names task, tick and device."""


class Kind(enum.StrEnum):
    """F and B: forward and whole backward of an LLM chunk. EF and EB: the same of the encoder."""

    F = "F"
    B = "B"
    EF = "EF"
    EB = "EB"

    @property
    def is_encoder(self) -> bool:
        return self in (Kind.EF, Kind.EB)

    @property
    def words(self) -> str:
        """Such as "encoder backward"."""
        module = "encoder" if self.is_encoder else "LLM"
        return f"{module} {'forward' if self in (Kind.F, Kind.EF) else 'backward'}"


_NOTATION = re.compile(
    r"(?P<kind>EF|EB|F|B)(?P<microbatch>\d+)"
    r"(?:c(?P<chunk>\d+))?"
    r"(?:\.(?P<units>\d+(?:\+\d+)*))?"
    r"(?:\[(?P<first>\d+):(?P<end>\d+)\))?"
)


@dataclasses.dataclass(frozen=True)
class Task:
    """One kind of work on one microbatch.

    `units` are the encoder units of the microbatch that the task covers, () meaning all of them;
    `layers` is the encoder layer range [first, end), None meaning all layers.

    Written `F3` (microbatch 3), `F3c1` (its chunk 1), `EF2` (all units of microbatch 2), `EF2.1`
    (its unit 1), `EF2.0+1` (two of its units), `EF2.1[0:4)` (layers 0 to 3 only).
    """

    kind: Kind
    microbatch: int
    chunk: int = 0
    units: tuple[int, ...] = ()
    layers: tuple[int, int] | None = None

    def __str__(self) -> str:
        chunk = f"c{self.chunk}" if self.chunk else ""
        units = "." + "+".join(map(str, self.units)) if self.units else ""
        layers = f"[{self.layers[0]}:{self.layers[1]})" if self.layers else ""
        return f"{self.kind}{self.microbatch}{chunk}{units}{layers}"

    @classmethod
    def parse(cls, text: str) -> Task:
        """The task that prints as `text`. Raises ScheduleError for anything else."""
        match = _NOTATION.fullmatch(text)
        if not match:
            raise ScheduleError(
                f"{text!r} is not a task; tasks look like F3, B3c1, EF2.1, EB2.0+1[0:4)"
            )
        kind = Kind(match["kind"])
        if kind.is_encoder and match["chunk"]:
            raise ScheduleError(f"{text!r}: encoder tasks have no chunk")
        if not kind.is_encoder and (match["units"] or match["first"]):
            raise ScheduleError(f"{text!r}: only encoder tasks have units and layers")
        task = cls(
            kind,
            int(match["microbatch"]),
            int(match["chunk"] or 0),
            tuple(map(int, match["units"].split("+"))) if match["units"] else (),
            (int(match["first"]), int(match["end"])) if match["first"] else None,
        )
        if str(task) != text:
            raise ScheduleError(f"{text!r} is not how a task is written, {str(task)!r} is")
        if task.layers and task.layers[0] >= task.layers[1]:
            raise ScheduleError(f"{text!r} has no layers: [first:end) needs first < end")
        return task


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Sizes of one LLM pipeline and of the encoder pipelines on its devices.

    Virtual stage v = chunk * stages + stage holds `llm_layers[v]` layers and runs on device
    v % stages. A microbatch's images are cut into `units` equal encoder units, as many as there are
    encoder pipelines, so that all can share one microbatch. Here every device holds a whole encoder
    and is an encoder pipeline; any of them may run any unit.
    """

    stages: int
    microbatches: int
    chunks: int = 1
    units: int = 0  # 0 stands for `stages`
    llm_layers: tuple[int, ...] = ()  # () stands for one layer in each virtual stage
    encoder_layers: int = 1

    def __post_init__(self) -> None:
        sizes = (self.stages, self.microbatches, self.chunks, self.encoder_layers)
        if min(sizes) < 1 or self.units < 0 or min(self.llm_layers, default=0) < 0:
            raise ScheduleError(f"sizes of a pipeline must be positive, got {self}")
        if not self.units:
            object.__setattr__(self, "units", self.stages)
        layers = tuple(self.llm_layers) or (1,) * self.virtual_stages
        object.__setattr__(self, "llm_layers", layers)
        if len(self.llm_layers) != self.virtual_stages:
            raise ScheduleError(
                f"{len(self.llm_layers)} layer counts for {self.virtual_stages} virtual stages"
                f" ({self.stages} stages x {self.chunks} chunks)"
            )

    @property
    def virtual_stages(self) -> int:
        return self.stages * self.chunks

    def units_of(self, task: Task) -> tuple[int, ...]:
        """The units that an encoder task covers, written out."""
        return task.units or tuple(range(self.units))

    def layers_of(self, task: Task) -> tuple[int, int]:
        """The encoder layers [first, end) that an encoder task covers, written out."""
        return task.layers or (0, self.encoder_layers)

    def short(self, task: Task) -> Task:
        """The task as it is written short: all units as (), all layers as None."""
        whole = task.units == tuple(range(self.units))
        every = task.layers == (0, self.encoder_layers)
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
        return frozenset(t.microbatch for o in self.orders for t in o if t.kind == Kind.EF)
