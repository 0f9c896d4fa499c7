"""Tasks, and the notation they are written in."""

from __future__ import annotations

import dataclasses
import enum
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
    def inside(self) -> Kind | None:
        """What a fused task of this kind has inside; None if there are no such tasks."""
        return {Kind.F: Kind.EF, Kind.B: Kind.EB}.get(self)

    @property
    def words(self) -> str:
        """Such as "encoder backward"."""
        module = "encoder" if self.is_encoder else "LLM"
        return f"{module} {'forward' if self in (Kind.F, Kind.EF) else 'backward'}"


_NOTATION = re.compile(
    r"(?P<kind>EF|EB|F|B)(?P<microbatch>\d+)"
    r"(?:c(?P<chunk>\d+))?"
    r"(?:e(?P<encoder>\d+))?"
    r"(?:\.(?P<units>\d+(?:\+\d+)*))?"
    r"(?:\[(?P<first>\d+):(?P<end>\d+)\))?"
)


@dataclasses.dataclass(frozen=True)
class Task:
    """One kind of work on one microbatch.

    `units` are the units of the microbatch that a task of encoder `encoder` covers, () meaning all
    of them; `layers` is its range [first, end) of the encoder's layers, None meaning all that the
    device's stage of the encoder has. A fused task is an LLM task that runs the encoder task
    `inside` between its own layers.

    Written `F3` (microbatch 3), `F3c1` (its chunk 1), `EF2` (all units of microbatch 2), `EF2.1`
    (its unit 1), `EF2.0+1` (two of its units), `EF2.1[0:4)` (layers 0 to 3 only), `EF2e1.1` (of
    encoder 1), `F3|EF5.1[0:4)` (fused).
    """

    kind: Kind
    microbatch: int
    chunk: int = 0
    units: tuple[int, ...] = ()
    layers: tuple[int, int] | None = None
    encoder: int = 0
    inside: Task | None = None

    def __str__(self) -> str:
        chunk = f"c{self.chunk}" if self.chunk else ""
        encoder = f"e{self.encoder}" if self.encoder else ""
        units = "." + "+".join(map(str, self.units)) if self.units else ""
        layers = f"[{self.layers[0]}:{self.layers[1]})" if self.layers else ""
        inside = f"|{self.inside}" if self.inside else ""
        return f"{self.kind}{self.microbatch}{chunk}{encoder}{units}{layers}{inside}"

    @property
    def llm_part(self) -> Task | None:
        """The task without what is inside; None for an encoder task."""
        if self.kind.is_encoder:
            return None
        return dataclasses.replace(self, inside=None) if self.inside else self

    @property
    def encoder_part(self) -> Task | None:
        """The encoder task that it is or has inside."""
        return self if self.kind.is_encoder else self.inside

    @classmethod
    def parse(cls, text: str) -> Task:
        """The task that prints as `text`. Raises ScheduleError for anything else."""
        llm, bar, encoder = text.partition("|")
        if not bar:
            return cls._parse_one(text)
        outer, inside = cls._parse_one(llm), cls._parse_one(encoder)
        if inside.kind != outer.kind.inside:
            raise ScheduleError(f"{text!r}: only an EF goes into an F, and only an EB into a B")
        if len(inside.units) > 1:
            raise ScheduleError(f"{text!r}: one unit goes into an LLM task, not {inside.units}")
        return dataclasses.replace(outer, inside=inside)

    @classmethod
    def _parse_one(cls, text: str) -> Task:
        match = _NOTATION.fullmatch(text)
        if not match:
            raise ScheduleError(
                f"{text!r} is not a task; tasks look like F3, B3c1, EF2.1, EB2e1.0+1[0:4)"
            )
        kind = Kind(match["kind"])
        if kind.is_encoder and match["chunk"]:
            raise ScheduleError(f"{text!r}: encoder tasks have no chunk")
        if not kind.is_encoder and (match["units"] or match["first"] or match["encoder"]):
            raise ScheduleError(f"{text!r}: only encoder tasks have units and layers")
        task = cls(
            kind,
            int(match["microbatch"]),
            int(match["chunk"] or 0),
            tuple(map(int, match["units"].split("+"))) if match["units"] else (),
            (int(match["first"]), int(match["end"])) if match["first"] else None,
            int(match["encoder"] or 0),
        )
        if str(task) != text:
            raise ScheduleError(f"{text!r} is not how a task is written, {str(task)!r} is")
        if task.layers and task.layers[0] >= task.layers[1]:
            raise ScheduleError(f"{text!r} has no layers: [first:end) needs first < end")
        return task
