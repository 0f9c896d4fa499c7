"""Seconds of LLM passes and encoder kernels of a cluster, and what they were taken from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from optimus_jax.cost.flops import layer_flops_forward
from optimus_jax.cost.kernels import Kernel, layer_kernels, load_profile
from optimus_jax.cost.transformer import MODELS
from optimus_jax.fill.backbone import ChunkPass
from optimus_jax.fill.baselines import LayerSeconds
from optimus_jax.fill.encoder import LayerPass
from optimus_jax.plan.cluster import Cluster, EncoderSpec, ParallelPlan

Pieces = tuple[tuple[float, bool], ...]  # seconds, and whether it is a collective

_OF_WEIGHTS = "_weight_gradient"
_REFERENCE_WIDTH, _REFERENCE_TP, _REFERENCE_POSITIONS = 12288, 8, 4096


class Times:
    """Seconds under a cluster's assumptions for LLM plans of one tensor-parallel degree."""

    def __init__(self, cluster: Cluster, plan: ParallelPlan):
        self.cluster, self.plan = cluster, plan
        self.profile = load_profile(cluster.profile) if cluster.profile else None
        a, llm = cluster.assume, cluster.llm
        kernels = layer_kernels(
            llm.model,
            cluster.parallel.microbatch,
            llm.length,
            plan.tp,
            cluster.chip,
            efficiency=a.efficiency or None,
            frozen=llm.frozen,
        )
        if self.profile:
            kernels = kernels.measured(self.profile, llm.name)
        self.llm_kernels = kernels

    def llm_pass(self, kind: str, layers: int = 1) -> ChunkPass:
        """The pass of a chunk with so many LLM layers: "F", "B", or "I" and "W", the parts of a
        backward that the stage before waits for and that nobody does."""
        busy = 0.0 if kind == "W" else self.cluster.assume.p2p_busy_s
        return ChunkPass(self._llm_pieces(kind) * layers, busy)

    def llm_layer(self) -> LayerSeconds:
        both = (sum(s for s, _ in self._llm_pieces(kind)) for kind in "FB")
        return LayerSeconds(*both)

    def _llm_pieces(self, kind: str) -> Pieces:
        """Compute and exposed collectives of one layer in turn."""
        a, llm = self.cluster.assume, self.cluster.llm
        if a.tp_collective_s:
            return self._by_operations(kind)
        forward, backward = self.llm_kernels.forward, self.llm_kernels.backward
        weights = tuple(k for k in backward if k.name.endswith(_OF_WEIGHTS))
        if kind == "F":
            return _merged(forward)
        if kind == "W":
            return _merged(weights)
        if kind == "I":
            backward = tuple(k for k in backward if k not in weights)
        return _merged((self.llm_kernels.recompute if llm.recompute == "full" else ()) + backward)

    def _by_operations(self, kind: str) -> Pieces:
        """The paper's own accounting: products at one efficiency, four equal collectives."""
        a, llm = self.cluster.assume, self.cluster.llm
        flops = layer_flops_forward(llm.model, llm.length) * self.cluster.parallel.microbatch
        rate = self.plan.tp * self.cluster.chip.flops["bfloat16"]
        forward = flops / (rate * (a.efficiency or self.cluster.chip.efficiency))
        collective = a.tp_collective_s * self._sent(llm.model.width)
        if kind == "W":
            return () if llm.frozen else (((a.llm_backward - 1) * forward, False),)
        times = {"F": 1.0, "I": 1.0, "B": 1.0 if llm.frozen else a.llm_backward}[kind]
        pieces = self._in_turn(times * forward, collective)
        if kind != "F" and llm.recompute == "full":
            return self._in_turn(forward, collective) + pieces
        return pieces

    def _in_turn(self, compute: float, collective: float) -> Pieces:
        if self.plan.tp == 1:
            return ((compute, False),)
        return ((compute / 4, False), (collective, True)) * 4

    def _sent(self, width: int) -> float:
        """What a layer's collective sends, beside that of a layer 12,288 wide with 4,096 positions
        on 8 devices."""
        cluster, tp = self.cluster, self.plan.tp
        positions = cluster.parallel.microbatch * cluster.llm.length
        share = (tp - 1) / tp / ((_REFERENCE_TP - 1) / _REFERENCE_TP)
        return width / _REFERENCE_WIDTH * positions / _REFERENCE_POSITIONS * share

    def exposed(self) -> tuple[float, float]:
        """Seconds of gathering parameters before the step and of scattering gradients after it that
        no compute hides: those of the first chunk (Optimus, section 2.2), or as assumed."""
        a, plan = self.cluster.assume, self.plan
        if a.dp_exposed_s >= 0:
            return a.dp_exposed_s * a.all_gather_share, a.dp_exposed_s * (1 - a.all_gather_share)
        if plan.dp == 1:
            return 0.0, 0.0
        layers = math.ceil(self.cluster.llm.model.layers / (plan.pp * plan.chunks))
        entries = layers * self.cluster.llm.model.layer_parameters / plan.tp
        entries += self.cluster.llm.model.embedding_parameters / plan.tp
        link = self.cluster.chip.network
        share = (plan.dp - 1) / plan.dp
        scatter = 0.0 if self.cluster.llm.frozen else link.seconds(4 * entries * share)
        return link.seconds(2 * entries * share), scatter

    def latency(self) -> float:
        """Seconds of a transfer between stages that occupies nobody; 0 where passes are busy with
        theirs by assumption."""
        if self.cluster.assume.p2p_busy_s or self.plan.pp == 1:
            return 0.0
        sent = 2 * self.cluster.parallel.microbatch * self.cluster.llm.length
        return self.cluster.chip.network.seconds(sent * self.cluster.llm.model.width / self.plan.tp)

    def encoder_layer(self, spec: EncoderSpec, backward: bool, tp: int) -> LayerPass:
        """One pass of an encoder layer on tp devices for a microbatch."""
        a = self.cluster.assume
        if a.vit_forward_s:
            return self._like_vit(spec, backward, tp)
        kernels = layer_kernels(
            spec.model,
            self.cluster.parallel.microbatch * (spec.tokens // spec.image_tokens),
            spec.image_tokens,
            tp,
            self.cluster.chip,
            efficiency=a.efficiency or None,
        )
        if self.profile:
            kernels = kernels.measured(self.profile, spec.name)
        chosen = kernels.backward if backward else kernels.forward
        if backward and spec.recompute == "full":
            chosen = kernels.recompute + chosen
        compute = [k.seconds for k in chosen if not k.is_communication]
        total = sum(compute)
        return LayerPass(
            total,
            sum(k.seconds for k in chosen if k.is_communication),
            max(1, int(total / max(compute))),
        )

    def _like_vit(self, spec: EncoderSpec, backward: bool, tp: int) -> LayerPass:
        """From the seconds of a ViT-22B layer that the paper gives: compute by operations and
        devices, collectives by width and by what each device sends."""
        a, positions = self.cluster.assume, self.cluster.parallel.microbatch * spec.tokens
        vit = MODELS["ViT-22B"]
        seconds = a.vit_backward_s if backward else a.vit_forward_s
        scale = layer_flops_forward(spec.model, spec.image_tokens) / layer_flops_forward(
            vit, spec.image_tokens
        )
        scale *= positions / _REFERENCE_POSITIONS
        compute = (seconds - 4 * a.vit_collective_s) * scale * _REFERENCE_TP / tp
        share = (tp - 1) / tp / ((_REFERENCE_TP - 1) / _REFERENCE_TP)
        sent = spec.model.width / vit.width * positions / _REFERENCE_POSITIONS * share
        if backward and spec.recompute == "full":
            forward = self._like_vit(spec, False, tp)
            compute += forward.compute
            sent *= 2
        return LayerPass(compute, 4 * a.vit_collective_s * sent, a.vit_kernels)

    def encoder_seconds(self, spec: EncoderSpec, tp: int) -> LayerSeconds:
        """Forward and backward of one encoder layer, collectives included."""
        backward = 0.0 if spec.frozen else self.encoder_layer(spec, True, tp).seconds
        return LayerSeconds(self.encoder_layer(spec, False, tp).seconds, backward)

    def constants(self) -> Mapping[str, float]:
        """What was assumed or measured beyond the hardware table."""
        values = dataclasses.asdict(self.cluster.assume)
        return {name: value for name, value in values.items() if value}


def _merged(kernels: tuple[Kernel, ...]) -> Pieces:
    """Neighbouring kernels of one sort as one piece."""
    pieces: list[tuple[float, bool]] = []
    for kernel in kernels:
        if pieces and pieces[-1][1] == kernel.is_communication:
            pieces[-1] = pieces[-1][0] + kernel.seconds, kernel.is_communication
        else:
            pieces.append((kernel.seconds, kernel.is_communication))
    return tuple(pieces)
