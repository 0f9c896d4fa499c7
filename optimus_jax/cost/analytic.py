"""Costs from operation counts and a table of chips: estimates, before anything is measured."""

from __future__ import annotations

import dataclasses
import itertools

from optimus_jax.config import Config, EncoderConfig, LlmConfig
from optimus_jax.cost.costs import NOTHING, Costs, EncoderCosts, Pass
from optimus_jax.cost.flops import layer_flops_forward
from optimus_jax.cost.hardware import HARDWARE, Chip
from optimus_jax.cost.transformer import Transformer

BYTES = {"float32": 4, "bfloat16": 2}
ADAMW = 30  # operations for each parameter


def analytic(config: Config) -> Costs:
    """What a device with the chip's rates would take.

    Tensor parallelism cuts the operations of layers, head and projector and adds the collectives
    of each layer: two sums of its activations forward (one in a parallel block) and two backward,
    and those of the forward where it is computed again. A backward is two forwards, and what the
    recompute policy drops once more (B = 3F under "full"). On a GPU collectives over replicas run
    beside encoder tasks, and those of tensor shards beside fused ones; on a CPU core they take its
    time.
    """
    model, parallel = config.model, config.parallel
    rates = _Rates(HARDWARE[config.hardware], model.dtype, config.hardware == "cpu_core")
    text, llm = config.microbatch_rows * model.sequence, model.llm
    layer, waiting = rates.layer(
        *(llm, text, model.sequence),
        *(parallel.tp, parallel.sequence_parallel, parallel.recompute),
    )
    head = rates.dense(text, llm.width, model.vocabulary, shards=parallel.tp)
    whole = not parallel.sequence_parallel
    wire = text * llm.width * BYTES[model.dtype] / (1 if whole else parallel.tp)
    gather, scatter, epilogue = _reductions(config, rates)
    return Costs(
        source=f"analytic ({config.hardware})",
        llm_layer=layer,
        llm_embedding=Pass(rates.chip.latency, rates.chip.latency),
        head=head.backward,  # F and 2F; with its input at hand, nothing is computed again
        encoders={name: _encoder(config, name, rates) for name in model.encoders},
        exchange=rates.transfer(wire),
        epilogue=epilogue,
        gather=gather,
        scatter=scatter,
        overlap=not rates.busy,
        window=waiting if parallel.fuse and not rates.busy else NOTHING,
    )


@dataclasses.dataclass(frozen=True)
class _Rates:
    """What takes how long on a chip; `busy` if communication takes the core's own time."""

    chip: Chip
    dtype: str
    busy: bool

    def seconds(self, flops: float) -> float:
        return flops / (self.chip.flops[self.dtype] * self.chip.efficiency) + self.chip.latency

    def transfer(self, size: float) -> float:
        return size / self.chip.link + self.chip.latency

    def shared(self, size: float, devices: int, apart: int) -> float:
        """Seconds in which each of `devices`, `apart` devices away from the next, gets or gives
        the others' parts of `size` bytes: an all-gather or a reduce-scatter on a ring."""
        if devices == 1:
            return 0.0
        sent = size * (devices - 1) / devices
        return self.chip.group_link(devices * apart).seconds(sent)

    def layer(
        self,
        part: EncoderConfig | LlmConfig,
        positions: float,
        length: int,
        shards: int,
        sequence_parallel: bool,
        recompute: str,
    ) -> tuple[Pass, Pass]:
        """A layer on `positions` in sequences of `length`, its collectives included; and those."""
        sizes = transformer(part)
        flops = positions / length * layer_flops_forward(sizes, length) / shards
        scores = 2 * positions * length * sizes.width / shards
        extra = {"full": flops, "selective": scores, "none": 0.0}[recompute]
        state = positions * sizes.width * BYTES[self.dtype]
        both = 2 * self.shared(state, shards, 1)  # a sum, or a gather and a scatter
        forward = both * (1 if sizes.parallel_block else 2)
        gathers = 0.5 if sequence_parallel else 0.0  # no policy keeps what they give
        backward = forward * (2 if recompute == "full" else 1 + gathers)
        waiting = Pass(forward, backward)
        own = Pass(self.seconds(flops), self.seconds(2 * flops + extra))
        return Pass(own.forward + forward, own.backward + backward), waiting

    def dense(self, positions: float, *widths: int, shards: int = 1) -> Pass:
        """Products in a row; their backward computes them again."""
        flops = sum(2 * positions * a * b for a, b in itertools.pairwise(widths)) / shards
        return Pass(self.seconds(flops), self.seconds(3 * flops))


def _encoder(config: Config, name: str, rates: _Rates) -> EncoderCosts:
    model, parallel = config.model, config.parallel
    encoder, plan, names = model.encoders[name], config.encoder_plans[name], list(model.encoders)
    units, tokens = config.pipeline.encoders[names.index(name)].units, model.features_of(name)
    lanes = parallel.tp // plan.tp
    patches = config.microbatch_rows * tokens / (units * lanes)
    audible = encoder.input == "audio"
    values = model.audio_bands if audible else encoder.patch * model.image_channels
    layer, _ = rates.layer(
        encoder, patches, tokens, plan.tp, plan.sequence_parallel, plan.recompute
    )
    size = units * patches * BYTES[model.dtype]  # an exchange has room for all units
    cut = plan.tp if plan.sequence_parallel else 1
    return EncoderCosts(
        layer=layer,
        input_embedding=rates.dense(patches, encoder.patch * values, encoder.width),
        projector=rates.dense(
            *(patches, encoder.width, model.projector_hidden, model.llm.width), shards=plan.tp
        ),
        feature_exchange=rates.transfer(size * model.llm.width),
        hidden_exchange=rates.transfer(size * encoder.width / cut) if plan.pp > 1 else None,
    )


def _reductions(config: Config, rates: _Rates) -> tuple[float, float, float]:
    """Seconds of gathering the LLM's weights, of scattering its gradients, and of the rest of a
    step: the encoders' collectives and a pass of AdamW, on the device with most layers. Embedding,
    head and projector are left out. Without ZeRO all gradients are summed whole, in the rest."""
    model, parallel, pipe = config.model, config.parallel, config.pipeline
    stage = max(sum(pipe.llm_layers[s :: pipe.stages]) for s in range(pipe.stages))
    inner = parallel.pp * parallel.tp
    modules = [(stage * transformer(model.llm).layer_parameters / parallel.tp, parallel.dp, inner)]
    for (name, encoder), sizes in zip(model.encoders.items(), pipe.encoders, strict=True):
        plan = config.encoder_plans[name]
        held = max(sizes.layers) * transformer(encoder).layer_parameters / plan.tp
        own = plan.pp * plan.tp
        modules.append((held, parallel.devices // own, own))
    times, optimiser = [], 0.0
    for held, replicas, apart in modules:
        scatter = rates.shared(held * BYTES[parallel.gradients], replicas, apart)
        weights = BYTES[model.dtype if parallel.zero else parallel.gradients]
        times.append((rates.shared(held * weights, replicas, apart), scatter))
        optimiser += ADAMW * held / (replicas if parallel.zero else 1)
    (gather, scatter), *others = times
    chip = rates.chip
    rest = sum(map(sum, others)) + optimiser / (chip.flops["float32"] * chip.efficiency)
    return (gather, scatter, rest) if parallel.zero else (0.0, 0.0, rest + gather + scatter)


def transformer(part: EncoderConfig | LlmConfig) -> Transformer:
    """The sizes of a module's layers."""
    return Transformer(
        "",
        part.layers,
        part.width,
        part.heads,
        part.hidden,
        kv_heads=part.kv_heads if isinstance(part, LlmConfig) else 0,
        gated=part.block == "llama",
        parallel_block=part.block == "vit22b",
        qk_norm=part.block == "vit22b",
    )
