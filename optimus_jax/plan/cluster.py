"""The question that a cluster engineer asks: models, devices, batch, and what is assumed."""

from __future__ import annotations

import dataclasses

from optimus_jax.cost.hardware import HARDWARE, Chip
from optimus_jax.cost.transformer import MODELS, Transformer


@dataclasses.dataclass(frozen=True)
class LlmSpec:
    """`name` is one of cost/transformer.py's models, or any word with sizes beside it. `length` is
    the positions of a sample, image tokens included. A frozen LLM passes gradients through."""

    name: str
    length: int
    frozen: bool = False
    recompute: str = "selective"
    layers: int = 0
    width: int = 0
    heads: int = 0
    hidden: int = 0
    kv_heads: int = 0
    gated: bool = False
    vocabulary: int = 0

    @property
    def model(self) -> Transformer:
        return _model(self)


@dataclasses.dataclass(frozen=True)
class EncoderSpec:
    """`tokens` are the encoder's positions of one sample, in images of `image_tokens` each.
    `stages` and `tp` fix its parallel plan; 0 stands for the planner's choice. `in_flight` is the
    most microbatches that one of its pipelines may hold under `filled` (0: what fits). A frozen
    encoder has no backward, keeps no activations, and its forward may run in the step before."""

    name: str
    tokens: int
    image_tokens: int = 256
    frozen: bool = False
    recompute: str = "selective"
    stages: int = 0
    tp: int = 0
    in_flight: int = 0
    layers: int = 0
    width: int = 0
    heads: int = 0
    hidden: int = 0

    @property
    def model(self) -> Transformer:
        return _model(self)


def _model(spec: LlmSpec | EncoderSpec) -> Transformer:
    if not spec.layers:
        return MODELS[spec.name]
    sizes = spec.name, spec.layers, spec.width, spec.heads, spec.hidden
    if isinstance(spec, EncoderSpec):
        return Transformer(*sizes)
    return Transformer(*sizes, spec.kv_heads, spec.gated, spec.vocabulary, causal=True)


@dataclasses.dataclass(frozen=True)
class ParallelPlan:
    """dp pipelines of pp ranks of tp devices, with `chunks` virtual stages on each rank."""

    dp: int
    pp: int
    tp: int
    chunks: int = 1

    def __str__(self) -> str:
        chunks = f" x {self.chunks} chunks" if self.chunks > 1 else ""
        return f"dp {self.dp} x pp {self.pp} x tp {self.tp}{chunks}"


@dataclasses.dataclass(frozen=True)
class LlmPlan:
    """`dp` pipelines of `pp` ranks with `tp` devices each and `chunks` virtual stages on a rank; a
    microbatch has `microbatch` samples. Where dp, pp, tp or chunks are 0, the planner searches."""

    dp: int = 0
    pp: int = 0
    tp: int = 0
    chunks: int = 0
    microbatch: int = 1


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """What no hardware table tells. Every value that a plan used is printed with it.

    `efficiency` is the share of peak that the LLM's products reach (0: the chip's), `llm_backward`
    its backward's compute beside its forward's where `tp_collective_s` is given. `p2p_busy_s` is
    what each chunk's pass takes longer for its transfers, jitter and contention. `dp_exposed_s` is
    the data-parallel communication that no compute hides (below 0: that of the first chunk), of
    which `all_gather_share` precedes the step. `tp_collective_s` is one tensor-parallel collective
    of a layer 12,288 wide (0: from the links). `vit_forward_s`, `vit_backward_s` and
    `vit_collective_s` are those of a ViT-22B layer on 8 devices with 4,096 positions, from which
    other encoders' follow by operations and width (0: from the chip); a layer's pass is
    `vit_kernels` equal kernels. Of the tensor-parallel slots a share `slot_usable` takes encoder
    work, which then runs `slot_contention` times as long. Of a device's memory the program may hold
    `memory_share`: what jax takes of it (XLA_CLIENT_MEM_FRACTION in gpu_settings.py); the rest is
    NCCL's and CUDA's.
    """

    efficiency: float = 0.0
    llm_backward: float = 2.0
    p2p_busy_s: float = 0.0
    dp_exposed_s: float = -1.0
    all_gather_share: float = 0.3
    tp_collective_s: float = 0.0
    vit_forward_s: float = 0.0
    vit_backward_s: float = 0.0
    vit_collective_s: float = 0.0
    vit_kernels: int = 3
    slot_usable: float = 1.0
    slot_contention: float = 1.0
    memory_share: float = 0.9


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A job to be planned. `memory_gb` is what a device has (0: what the chip has), of
    which a plan may hold `assume.memory_share`."""

    hardware: str
    gpus: int
    batch: int
    llm: LlmSpec
    encoders: dict[str, EncoderSpec]
    parallel: LlmPlan
    assume: Assumptions = Assumptions()
    memory_gb: float = 0.0
    profile: str = ""

    @property
    def chip(self) -> Chip:
        return HARDWARE[self.hardware]

    @property
    def capacity(self) -> float:
        """Bytes that a plan may hold on a device."""
        return self.assume.memory_share * self.memory

    @property
    def memory(self) -> float:
        """Bytes that a device has."""
        return self.memory_gb * 1e9 if self.memory_gb else self.chip.memory

    def microbatches(self, plan: ParallelPlan) -> int:
        """Microbatches of each LLM pipeline."""
        return self.batch // (plan.dp * self.parallel.microbatch)
