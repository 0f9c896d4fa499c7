"""Small parallel plans to verify: every size of the grid, every kind of model, in miniature."""

from __future__ import annotations

import dataclasses
import math

from optimus_jax.config import FIRST, EncoderConfig, LlmConfig, ModelConfig, split_layers
from optimus_jax.data import tokens
from optimus_jax.schedule.balanced import balanced_pipeline
from optimus_jax.schedule.simulate import Durations
from optimus_jax.schedule.task import EncoderPipeline, Pipeline


@dataclasses.dataclass(frozen=True)
class Tower:
    """An encoder of a verified plan: what it sees, its kind of layers, its own parallel plan."""

    input: str = "image"
    block: str = "vit"
    pp: int = 1
    tp: int = 1
    layers: int = 4
    recompute: str = "full"


@dataclasses.dataclass(frozen=True)
class SmallPlan:
    """A parallel plan to verify, with the small model that it runs. The LLM's layers are cut
    unevenly where there are stages."""

    pp: int
    dp: int
    chunks: int
    microbatches: int
    tp: int = 1
    towers: tuple[Tower, ...] = (Tower(),)
    block: str = "gpt"
    recompute: str = "full"
    sequence: bool = True
    zero: bool = False
    fuse: bool = False
    cap: int = 0
    dtype: str = "float32"
    balanced: bool = False  # layers split by cost; the one tower has as many stages as the LLM

    def __str__(self) -> str:
        flags = ("zero", "fuse", "balanced")
        words = [
            f"pp{self.pp} dp{self.dp} tp{self.tp} V{self.chunks} M{self.microbatches}",
            f"{self.block} {self.recompute}",
            *(f"{t.input}({t.block} pp{t.pp} tp{t.tp} {t.recompute})" for t in self.towers),
            *(name for name in flags if getattr(self, name)),
            *([] if self.sequence else ["no sequence parallelism"]),
            *([f"cap{self.cap}"] if self.cap else []),
            *([] if self.dtype == "float32" else [self.dtype]),
        ]
        return " ".join(words)

    @property
    def pipeline(self) -> Pipeline:
        virtual = self.pp * self.chunks
        if self.balanced:
            (tower,) = self.towers
            costs = [0.5] * tower.layers, [1.0] * (virtual + 1)
            return balanced_pipeline(self.pp, self.microbatches, self.chunks, *costs, self.cap)
        encoders = tuple(EncoderPipeline(split_layers(t.layers, t.pp)) for t in self.towers)
        layers = split_layers(virtual + (virtual > 1), virtual)
        return Pipeline(self.pp, self.microbatches, self.chunks, layers, encoders, self.cap)

    @property
    def durations(self) -> Durations:
        """Of tasks, so that schedules are made; with fused tasks there is time to hide in, and
        with ZeRO time for tasks beside its collectives."""
        some = Durations.uniform(self.pipeline, encoder=0.7)
        if self.fuse:
            some = dataclasses.replace(some, window=(0.05, 0.1))
        if self.zero:
            some = dataclasses.replace(some, gather=0.5, scatter=0.5, overlap=True)
        return some

    @property
    def names(self) -> list[str]:
        return [FIRST, *(f"tower{k}" for k in range(1, len(self.towers)))]

    @property
    def rows(self) -> int:
        """Of a microbatch: two for each part that an encoder cuts it into."""
        return 2 * math.lcm(*(self.pp // t.pp * (self.tp // t.tp) for t in self.towers))

    @property
    def sizes(self) -> ModelConfig:
        """Of the model: odd where nothing has to divide, so that mixed-up dimensions show."""
        cut = self.tp > 1
        heads, kv = (4, 4 if self.tp == 4 else 2) if cut else (3, 0)
        if self.block == "llama" and not cut:
            heads, kv = 4, 2
        towers = [
            EncoderConfig(
                layers=t.layers,
                width=16,
                heads=4 if t.tp == 4 else 2,
                hidden=24,
                patch=3 if t.input == "audio" else 4,
                block=t.block,
                input=t.input,
            )
            for t in self.towers
        ]
        return ModelConfig(
            dtype=self.dtype,
            image_height=8,
            image_width=16 if cut else 12,
            text_length=8 if cut else 5,
            encoder=towers[0],
            projector_hidden=20,
            llm=LlmConfig(
                layers=sum(self.pipeline.llm_layers),
                width=24,
                heads=heads,
                hidden=40,
                block=self.block,
                kv_heads=kv if self.block == "llama" else 0,
            ),
            vocabulary=4 * -(-tokens.SIZE // 4),
            audio_frames=12,
            audio_bands=5,
            more_encoders=dict(zip(self.names[1:], towers[1:], strict=True)),
        )
