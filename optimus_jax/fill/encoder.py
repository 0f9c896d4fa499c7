"""An encoder's work on the pipelines that share the LLM's devices, as kernels of equal length."""

from __future__ import annotations

import dataclasses
import math

from optimus_jax.fill.windows import Kernel
from optimus_jax.schedule.task import ScheduleError


@dataclasses.dataclass(frozen=True)
class LayerPass:
    """One pass of an encoder layer on one device for a whole microbatch: `kernels` equal kernels
    that compute for `compute` seconds together, and `communication` seconds of its collectives."""

    compute: float
    communication: float
    kernels: int

    @property
    def seconds(self) -> float:
        return self.compute + self.communication


@dataclasses.dataclass(frozen=True)
class Work:
    """The kernels of one pass on an encoder pipeline: of a whole microbatch and of one unit of it,
    `counts[stage]` and `unit_counts[stage]` of them in each encoder stage."""

    whole: Kernel
    counts: tuple[int, ...]
    unit: Kernel
    unit_counts: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """Of a whole microbatch without LLM work beside it, all stages together."""
        return sum(self.counts) * self.whole.full

    def through(self, spread: bool) -> float:
        """Seconds in which one microbatch passes all stages: whole, or spread in units over all
        pipelines."""
        return sum(self.unit_counts) * self.unit.full if spread else self.seconds


@dataclasses.dataclass(frozen=True)
class EncoderPlan:
    """`pipelines` encoder pipelines of `stages` stages beside one LLM pipeline of `ranks` ranks.

    `copies` of them stand on the same ranks, on different devices of the LLM's tensor-parallel
    group (TP_llm / TP_enc): they see the same idle time. Pipeline j runs on ranks
    first(j) .. first(j) + stages - 1 (Optimus, section 4.1). `backward` is None if the encoder is
    frozen; then its forward waits for no weights and may run in the step before (`crosses_steps`).
    """

    ranks: int
    stages: int
    copies: int
    forward: Work
    backward: Work | None
    crosses_steps: bool = False

    def __post_init__(self) -> None:
        if self.ranks % self.stages:
            raise ScheduleError(
                f"{self.stages} encoder stages do not divide the LLM's {self.ranks} pipeline stages"
            )

    @property
    def pipelines(self) -> int:
        return self.ranks // self.stages * self.copies

    def first(self, pipeline: int) -> int:
        return pipeline // self.copies * self.stages

    @property
    def seconds(self) -> float:
        """Encoder work of one microbatch, forward and backward, summed over its stages."""
        return self.forward.seconds + (self.backward.seconds if self.backward else 0.0)


def work(
    layer: LayerPass, layers: int, stages: int, pipelines: int, cut: float | None = None
) -> Work:
    """The kernels of `layers` encoder layers on `stages` stages. With `cut`, kernels that compute
    longer than so many seconds are cut into equal parts that do not; None leaves them whole.

    A unit is 1 / `pipelines` of a microbatch's images: its kernels are so much shorter.
    Raises ScheduleError if there are fewer layers than stages.
    """
    if layers < stages:
        raise ScheduleError(f"{layers} encoder layers cannot fill {stages} encoder stages")
    share, more = divmod(layers, stages)
    per_stage = [share + (s < more) for s in range(stages)]
    stretch = layer.seconds / layer.compute if layer.compute else 1.0

    def kernel(scale: float) -> tuple[Kernel, int]:
        length = layer.compute / layer.kernels * scale
        parts = math.ceil(length / cut - 1e-9) if cut and length > cut else 1
        return Kernel(length / parts, length / parts * stretch), layer.kernels * parts

    whole, count = kernel(1.0)
    unit, unit_count = kernel(1.0 / pipelines)
    return Work(
        whole,
        tuple(n * count for n in per_stage),
        unit,
        tuple(n * unit_count for n in per_stage),
    )
