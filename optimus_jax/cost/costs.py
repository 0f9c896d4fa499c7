"""Costs: seconds of each kind of work, by layer, and of a transfer."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
from typing import Any

from optimus_jax.config import Config, EncoderConfig, LlmConfig
from optimus_jax.cost.flops import layer_flops_forward
from optimus_jax.cost.hardware import HARDWARE, Chip
from optimus_jax.cost.transformer import Transformer
from optimus_jax.schedule.simulate import Durations


@dataclasses.dataclass(frozen=True)
class Pass:
    """Seconds of one forward, and of its backward with the layer's recomputation."""

    forward: float
    backward: float


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds on one device. LLM parts are of one microbatch, encoder parts of one encoder unit.

    `source` says where the numbers come from: 'analytic' ones are estimates from operation counts
    and a table of chips, not measurements. `llm_task` is what an LLM task takes beside its layers.
    `head` is forward with its backward, both run by the last stage's F. `exchange` is one transfer
    of an LLM payload between two devices, `feature_exchange` one of features (None: the same),
    `epilogue` the rest of a step: gradient reduction, norm, optimiser, start and end.
    """

    source: str
    llm_layer: Pass
    llm_embedding: Pass
    head: float
    encoder_layer: Pass
    patch_embedding: Pass
    projector: Pass
    exchange: float
    epilogue: float
    feature_exchange: float | None = None
    llm_task: Pass = Pass(0.0, 0.0)

    def durations(self, config: Config) -> Durations:
        """The seconds of each task and transfer."""
        pipe = config.pipeline
        task, layer = self.llm_task, self.llm_layer
        forward = [task.forward + n * layer.forward for n in pipe.llm_layers]
        backward = [task.backward + n * layer.backward for n in pipe.llm_layers]
        forward[0] += self.llm_embedding.forward
        backward[0] += self.llm_embedding.backward
        forward[-1] += self.head
        encoder_forward = [self.encoder_layer.forward] * pipe.encoder_layers
        encoder_backward = [self.encoder_layer.backward] * pipe.encoder_layers
        for end, part in ((0, self.patch_embedding), (-1, self.projector)):
            encoder_forward[end] += part.forward
            encoder_backward[end] += part.backward
        return Durations(
            tuple(forward),
            tuple(backward),
            tuple(encoder_forward),
            tuple(encoder_backward),
            transfer=self.exchange if pipe.stages > 1 else 0.0,
            feature_transfer=self.feature_exchange if pipe.stages > 1 else None,
            epilogue=self.epilogue,
        )

    def _check(self) -> None:
        """Raises TypeError for a part that is not seconds."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "source" or (value is None and field.default is None):
                continue
            seconds = [value]
            if field.type == "Pass":
                seconds = list(dataclasses.astuple(value)) if isinstance(value, Pass) else [None]
            if not all(type(s) in (int, float) and 0 <= s < float("inf") for s in seconds):
                raise TypeError(f"{field.name} is {value!r}, not seconds")

    def save(self, path: str | pathlib.Path) -> None:
        pathlib.Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | pathlib.Path) -> Costs:
        """Costs that `save` wrote, or those in a profile (measure/profile.py).

        Raises OSError if there is no such file, ValueError if it holds no costs.
        """
        values: dict[str, Any] = json.loads(pathlib.Path(path).read_text())
        try:
            parts: dict[str, Any] = {
                name: Pass(**value) if isinstance(value, dict) else value
                for name, value in values.get("costs", values).items()
            }
            costs = cls(**parts)
            costs._check()
            return costs
        except (TypeError, AttributeError) as error:
            raise ValueError(f"not costs: {error}") from None


def analytic(config: Config) -> Costs:
    """Costs from operation counts; a backward computes its layer's forward again (B = 3F)."""
    model, parallel = config.model, config.parallel
    chip, dtype = HARDWARE[config.hardware], config.model.dtype
    rows, unit_rows = config.microbatch_rows, config.microbatch_rows // parallel.pp
    text, patches = rows * model.sequence, unit_rows * model.image_tokens
    llm, encoder = model.llm, model.encoder

    def seconds(flops: float) -> float:
        return flops / (chip.flops[dtype] * chip.efficiency) + chip.latency

    def layer(part: EncoderConfig | LlmConfig, positions: int, length: int) -> Pass:
        flops = positions / length * layer_flops_forward(_transformer(part), length)
        return Pass(seconds(flops), seconds(3 * flops))

    def dense(positions: int, *widths: int) -> Pass:
        flops = sum(2 * positions * a * b for a, b in itertools.pairwise(widths))
        return Pass(seconds(flops), seconds(3 * flops))

    head = dense(text, llm.width, model.vocabulary)
    payload = text * llm.width * (4 if dtype == "float32" else 2)
    return Costs(
        source=f"analytic ({config.hardware})",
        llm_layer=layer(llm, text, model.sequence),
        llm_embedding=Pass(chip.latency, chip.latency),
        head=head.backward,  # F and 2F; with its input at hand, nothing is computed again
        encoder_layer=layer(encoder, patches, model.image_tokens),
        patch_embedding=dense(patches, encoder.patch**2 * model.image_channels, encoder.width),
        projector=dense(patches, encoder.width, model.projector_hidden, llm.width),
        exchange=payload / chip.link + chip.latency,
        epilogue=_epilogue(config, chip),
    )


def emulated(config: Config) -> Costs:
    """Costs that tasks of an emulated run sleep for (config.emulate): every chunk takes the same,
    embedding, head and the encoder's ends nothing. Exchange and epilogue are not emulated: 0."""
    e, pipe, nothing = config.emulate, config.pipeline, Pass(0.0, 0.0)
    stage = e.chunk_forward_s * pipe.chunks
    part = stage / (pipe.units * pipe.encoder_layers)
    return Costs(
        source="emulated",
        llm_task=Pass(e.chunk_forward_s, e.chunk_forward_s * e.backward),
        llm_layer=nothing,
        llm_embedding=nothing,
        head=0.0,
        encoder_layer=Pass(part * e.encoder, part * e.encoder_backward),
        patch_embedding=nothing,
        projector=nothing,
        exchange=0.0,
        epilogue=0.0,
    )


def _transformer(part: EncoderConfig | LlmConfig) -> Transformer:
    return Transformer("", part.layers, part.width, part.heads, part.hidden)


def _epilogue(config: Config, chip: Chip) -> float:
    """All-reduce of the layers' gradients in float32 and a pass of AdamW over them, on the device
    with most LLM layers; embedding, head and projector are left out."""
    llm, encoder, parallel = config.model.llm, config.model.encoder, config.parallel

    stage = sum(config.pipeline.llm_layers[:: parallel.pp])
    own = stage * _transformer(llm).layer_parameters
    shared = encoder.layers * _transformer(encoder).layer_parameters
    devices = parallel.dp * parallel.pp
    moved = 2 * 4 * (own * (parallel.dp > 1) + shared * (devices > 1))
    return moved / chip.link + 30 * (own + shared) / (chip.flops["float32"] * chip.efficiency)
