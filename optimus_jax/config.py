"""The run's configuration: frozen dataclasses, made once from a ConfigDict and checked."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from optimus_jax import config_checks, parallel_checks
from optimus_jax.config_checks import ConfigError
from optimus_jax.data import tokens
from optimus_jax.schedule.task import EncoderPipeline, Pipeline
from optimus_jax.settings import build, with_defaults

FIRST = "vision"  # the name of `model.encoder` beside those of `model.more_encoders`


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """`hidden` is the MLP's width. `block` names an entry of models/blocks.py.

    An encoder of `input` "image" sees square patches of `patch` pixels a side, one of "audio"
    stretches of `patch` frames of a spectrogram.
    """

    layers: int
    width: int
    heads: int
    hidden: int
    patch: int
    block: str = "vit"
    input: str = "image"


@dataclasses.dataclass(frozen=True)
class LlmConfig:
    """`block` names an entry of models/blocks.py. `kv_heads` share keys and values among groups of
    heads; 0 stands for as many as heads."""

    layers: int
    width: int
    heads: int
    hidden: int
    block: str = "gpt"
    kv_heads: int = 0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """`dtype` is that of the computation; master weights and optimiser state are float32.

    Pictures have `image_height` x `image_width` pixels, spectrograms `audio_frames` x
    `audio_bands` values. The LLM sees the features of every encoder, then `text_length` positions
    of text. `more_encoders` stand beside the first, by name.
    """

    dtype: str
    image_height: int
    image_width: int
    text_length: int
    encoder: EncoderConfig
    projector_hidden: int
    llm: LlmConfig
    image_channels: int = 1
    vocabulary: int = tokens.SIZE
    image_token: int = tokens.IMAGE
    audio_frames: int = 0
    audio_bands: int = 0
    more_encoders: dict[str, EncoderConfig] = dataclasses.field(default_factory=dict)

    @property
    def encoders(self) -> dict[str, EncoderConfig]:
        """All encoders by name, the first is `FIRST`."""
        return {FIRST: self.encoder, **self.more_encoders}

    def features_of(self, name: str) -> int:
        """Positions that an encoder gives for one example."""
        encoder = self.encoders[name]
        if encoder.input == "audio":
            return self.audio_frames // encoder.patch
        return (self.image_height // encoder.patch) * (self.image_width // encoder.patch)

    @property
    def image_tokens(self) -> int:
        """Positions of all encoders' features; the text has an image token at each."""
        return sum(map(self.features_of, self.encoders))

    @property
    def sequence(self) -> int:
        """Positions that the LLM sees."""
        return self.image_tokens + self.text_length


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """`name` is a key of data/sources.py. `folder` holds the data; empty, it is looked for where
    launch/data.sh or the Debian package puts it; the data set "folder" has to have one. There,
    `mirror` shows half of the train pictures mirrored, but none whose caption says left or right.
    Pictures of the digits show `digits_low` to `digits_high` of them; for other data sets both are
    0. In training, a share of up to `hide_text` of a caption's characters, drawn for each example,
    is not shown to the LLM, which still has to predict it: less to learn by heart, more to see in
    the picture. A run resumes only with the examples that its checkpoint was trained on, or with
    `allow_changes` with any."""

    name: str
    folder: str = ""
    hide_text: float = 0.0
    digits_low: int = 0
    digits_high: int = 0
    mirror: bool = False
    allow_changes: bool = False


@dataclasses.dataclass(frozen=True)
class EncoderParallel:
    """The parallel plan of an encoder: `pp` stages, which divide the LLM's, and `tp` shards, which
    divide the LLM's; the rest of the devices are replicas. `recompute` as in ParallelConfig."""

    pp: int = 1
    tp: int = 1
    sequence_parallel: bool = True
    recompute: str = "full"


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """`dp` replicas of a pipeline of `pp` stages with `chunks` virtual stages on each device, every
    layer cut over `tp` devices; the batch of a replica is cut into `microbatches`. `order` is that
    of the LLM's tasks, `method` says where the encoder's go.

    `sequence_parallel` cuts what lies between a layer's products over the tensor axis too. `zero`
    cuts master weights and optimiser state over replicas (ZeRO-1). `recompute` says which
    activations a backward computes again: "full", "selective" or "none". `gradients` is the dtype
    in which they are summed over microbatches. A device holds encoder activations of at most its
    pipeline's even share of `encoder_cap` microbatches at a time (0: of any number). With `fuse`,
    encoder layers may run inside the LLM's, beside its tensor-parallel collectives.
    """

    dp: int
    pp: int
    chunks: int
    microbatches: int
    order: str
    method: str
    tp: int = 1
    encoder: EncoderParallel = EncoderParallel()
    more_encoders: dict[str, EncoderParallel] = dataclasses.field(default_factory=dict)
    sequence_parallel: bool = True
    zero: bool = True
    recompute: str = "full"
    gradients: str = "float32"
    encoder_cap: int = 0
    fuse: bool = False

    @property
    def devices(self) -> int:
        return self.dp * self.pp * self.tp


@dataclasses.dataclass(frozen=True)
class EmulateConfig:
    """Task times of an emulated run (`bench --emulate`): seconds of an LLM chunk's forward, and as
    multiples of a whole stage's forward the stage's backward and the encoder's forward and backward
    of one microbatch."""

    chunk_forward_s: float = 0.02
    backward: float = 2.0
    encoder: float = 1.0
    encoder_backward: float = 2.0


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """`batch` rows a step over all replicas; AdamW with linear warm-up over `warmup` steps, cosine
    decay to zero at `steps`, gradients clipped to global norm `clip`. Steps are counted from 0."""

    seed: int
    batch: int
    steps: int
    learning_rate: float
    warmup: int
    weight_decay: float
    clip: float
    log_every: int
    save_every: int
    keep: int


@dataclasses.dataclass(frozen=True)
class Config:
    """`hardware` names an entry of cost/hardware.py, for predicted times."""

    hardware: str
    model: ModelConfig
    data: DataConfig
    parallel: ParallelConfig
    train: TrainConfig
    evaluate_examples: int
    emulate: EmulateConfig = EmulateConfig()

    def __post_init__(self) -> None:
        # each further encoder has a plan, in the model's order
        given = self.parallel.more_encoders
        plans = {name: given.get(name, EncoderParallel()) for name in self.model.more_encoders}
        parallel = dataclasses.replace(self.parallel, more_encoders={**plans, **given})
        object.__setattr__(self, "parallel", parallel)

    @property
    def encoder_plans(self) -> dict[str, EncoderParallel]:
        """The parallel plan of every encoder, in the order of `model.encoders`."""
        return {FIRST: self.parallel.encoder, **self.parallel.more_encoders}

    @property
    def microbatch_rows(self) -> int:
        return self.train.batch // (self.parallel.dp * self.parallel.microbatches)

    def on(self, pipe: Pipeline) -> Config:
        """The same with as many stages of each encoder as the pipeline has: its grid."""
        stages = zip(self.encoder_plans.items(), pipe.encoders, strict=True)
        plans = {name: dataclasses.replace(own, pp=sizes.stages) for (name, own), sizes in stages}
        first, *_ = plans.values()
        more = {name: plans[name] for name in self.parallel.more_encoders}
        parallel = dataclasses.replace(self.parallel, encoder=first, more_encoders=more)
        return dataclasses.replace(self, parallel=parallel)

    @property
    def pipeline(self) -> Pipeline:
        """The sizes that the scheduling core works with."""
        p, encoders = self.parallel, self.model.encoders
        return Pipeline(
            stages=p.pp,
            microbatches=p.microbatches,
            chunks=p.chunks,
            llm_layers=split_layers(self.model.llm.layers, p.pp * p.chunks),
            encoders=tuple(
                EncoderPipeline(split_layers(encoders[name].layers, plan.pp))
                for name, plan in self.encoder_plans.items()
            ),
            cap=p.encoder_cap,
        )


def split_layers(layers: int, virtual_stages: int) -> tuple[int, ...]:
    """Layers of each virtual stage, as equal as can be. The first stages get those left over: the
    last one also computes the head and its gradient."""
    share, more = divmod(layers, virtual_stages)
    return tuple(share + (v < more) for v in range(virtual_stages))


def from_config_dict(values: Mapping[str, Any]) -> Config:
    """The checked configuration. Raises ConfigError with every error found."""
    errors: list[str] = []
    built: Config = build(Config, values, "config", errors)
    for check in (*config_checks.CHECKS, *parallel_checks.CHECKS):
        # a value of the wrong type is reported once, by build
        with contextlib.suppress(AttributeError, TypeError, ZeroDivisionError):
            errors += check(built)
    if errors:
        raise ConfigError(errors)
    return built


def filled_in(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with the defaults of those that are left out, so that each has a name that it
    can be changed by."""
    model, parallel = values.get("model"), values.get("parallel")
    if isinstance(model, Mapping) and isinstance(parallel, Mapping):
        plans: dict[str, Any] = {name: {} for name in model.get("more_encoders", {})}
        plans |= parallel.get("more_encoders", {})
        values = {**values, "parallel": {**parallel, "more_encoders": plans}}
    return with_defaults(Config, values)
