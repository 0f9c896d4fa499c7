"""Filling: where encoders' work lies beside the LLM's step, and what that step then takes."""

from __future__ import annotations

import dataclasses
import functools

from optimus_jax.fill.backbone import Backbone
from optimus_jax.fill.encoder import EncoderPlan
from optimus_jax.fill.packing import Placed
from optimus_jax.fill.pieces import Piece, pieces_of
from optimus_jax.fill.windows import SlotRule


@dataclasses.dataclass(frozen=True, eq=False)
class Filling:
    """Encoder work placed around and between the passes of a Backbone (times are the backbone's).

    Work before -all_gather delays the LLM by `delay`, work after end + reduce_scatter lengthens
    the step by `tail`. The forward of a frozen encoder may lie in the step before: that delays
    nothing.
    """

    method: str
    backbone: Backbone
    rule: SlotRule
    placed: tuple[Placed, ...]

    @functools.cached_property
    def delay(self) -> float:
        begins = [
            span[0]
            for one in self.placed
            if not one.crosses
            for part in one.forward.parts
            for span in part.spans
        ]
        return max(0.0, -self.backbone.all_gather - min(begins, default=0.0))

    @functools.cached_property
    def tail(self) -> float:
        lasts = [one.backward.last for one in self.placed if one.backward]
        step = self.backbone.end + self.backbone.reduce_scatter
        return max(0.0, max(lasts, default=0.0) - step)

    @property
    def step(self) -> float:
        """Seconds of the step."""
        return self.backbone.step + self.delay + self.tail

    @functools.cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces, part by part, in the order in which they were packed."""
        return tuple(pieces_of(self.backbone, self.rule, self.placed))

    @functools.cached_property
    def encoder_seconds(self) -> float:
        """Encoder work for each device and step: N w / P, of all encoders."""
        return encoder_seconds(self.backbone, [one.plan for one in self.placed])

    @property
    def time_share(self) -> float:
        """How much of the encoder's time the step does not get longer by: 1 - (step - LLM alone)
        / E. 1 without encoder work."""
        total = self.encoder_seconds
        return 1 - (self.step - self.backbone.step) / total if total else 1.0

    @functools.cached_property
    def inside_share(self) -> float:
        """Share of encoder work inside the LLM's own step, by the place of every kernel: what the
        paper's Eff seems to be. 1 without encoder work."""
        low, high = self.backbone.frame
        outside = 0.0
        for piece in self.pieces:
            one = self.placed[piece.encoder]
            if not one.crosses:
                beyond = max(0.0, min(piece.end, low) - piece.start)
                beyond += max(0.0, piece.end - max(piece.start, high))
                outside += beyond / one.plan.copies
        total = self.encoder_seconds * self.backbone.ranks
        return 1 - outside / total if total else 1.0

    def in_flight(self) -> list[float]:
        """By encoder, the most microbatches on one of its pipelines whose forward has begun and
        whose backward has not ended, a unit counting as its share of one."""
        return [max(_peaks(one), default=0.0) for one in self.placed]


def _peaks(one: Placed) -> list[float]:
    """Peak of each pipeline. A frozen encoder holds nothing."""
    if one.backward is None:
        return [0.0] * one.plan.pipelines
    events: list[list[tuple[float, float]]] = [[] for _ in range(one.plan.pipelines)]
    for packed, sign in ((one.forward, 1.0), (one.backward, -1.0)):
        for part in packed.parts:
            size = 1 / one.plan.pipelines if part.unit else 1.0
            at = min(s for s, _ in part.spans) if sign > 0 else max(e for _, e in part.spans)
            events[part.pipeline].append((at, sign * size))
    peaks = []
    for mine in events:
        level = peak = 0.0
        for _, change in sorted(mine):
            level += change
            peak = max(peak, level)
        peaks.append(peak)
    return peaks


def encoder_seconds(backbone: Backbone, plans: list[EncoderPlan]) -> float:
    """E = N w / P, with w the work of one microbatch; copies share it."""
    work = sum(plan.seconds / plan.copies for plan in plans)
    return backbone.microbatches * work / backbone.ranks


def time_bounds(backbone: Backbone, plans: list[EncoderPlan]) -> tuple[float, float]:
    """Time shares that no packing can beat: with whole microbatches, and with the first and the
    last one spread in units over all pipelines. The first microbatch's forward precedes all LLM
    work and the last one's backward follows its last gradient; gathering and scattering, and
    weight gradients that come after that, can hide so much of them.
    """
    total = encoder_seconds(backbone, plans)

    def bound(spread: bool) -> float:
        forward = [0.0] + [p.forward.through(spread) for p in plans if not p.crosses_steps]
        backward = [0.0] + [p.backward.through(spread) for p in plans if p.backward]
        exposed = max(0.0, max(forward) - backbone.all_gather)
        exposed += max(0.0, max(backward) - (backbone.frame[1] - backbone.given[-1]))
        return 1 - exposed / total if total else 1.0

    return bound(False), bound(True)


def least_step(backbone: Backbone, plans: list[EncoderPlan], spread: bool) -> float:
    """Seconds that no packing's step can beat, by time_bounds."""
    exposed = 1 - time_bounds(backbone, plans)[spread]
    return backbone.step + exposed * encoder_seconds(backbone, plans)
