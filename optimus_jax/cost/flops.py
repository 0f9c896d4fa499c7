"""Operations of a multimodal training step, and the shares of a cluster's peak that they make.

A multiplication with its addition counts as 2. Only products of matrices count: layers, patch
embedding, projector and head, not norms, activations, softmax or the lookup of token embeddings.

Attention is counted in one of two ways. The usual count, as in PaLM (arXiv 2204.02311, appendix B)
and Megatron-LM's papers, takes all length^2 pairs of a sequence, causal or not. The exact count
takes half of them where the mask is causal, which is what a flash kernel runs. In both, sequences
packed into one row attend to themselves only: the sum of their squares counts.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from optimus_jax.cost.hardware import Chip
from optimus_jax.cost.transformer import Transformer
from optimus_jax.errors import UserError

# Attention forwards that a backward runs again: flash attention computes the scores again, one of
# the forward's two products; under full recompute this comes on top of the layer's whole forward.
_SCORES_AGAIN = {"none": 0.0, "selective": 0.5, "full": 0.5}


def layer_flops_forward(model: Transformer, length: int, causal: bool = False) -> float:
    """Operations of one layer's forward for one sequence: 2 for each weight and position, and
    scores and mixing over `length` positions; `causal` takes half of the pairs (exact count)."""
    return 2 * length * model.layer_parameters + _attention(model, length**2, causal)


def head_flops_forward(model: Transformer, positions: int) -> float:
    """Operations of the head's forward, 0 without a vocabulary."""
    return 2 * positions * model.width * model.vocabulary


def embedding_flops_forward(model: Transformer, positions: int, patch_values: int = 0) -> float:
    """Operations of an embedding: of patches of so many values each, a product; of tokens
    (`patch_values` 0), a lookup that computes nothing."""
    return 2 * positions * patch_values * model.width


@dataclasses.dataclass(frozen=True)
class Images:
    """What an encoder and its projector do in a step: `images_padded` run, `images_real` count.

    An image has `tokens` positions of `patch_values` values each (0: no patch embedding counted).
    `projector` are its widths in order, such as (encoder, hidden, LLM); () for none. `recompute` is
    "none", "selective" (flash attention) or "full". Raises UserError for what cannot be.
    """

    model: Transformer
    tokens: int
    images_real: int
    images_padded: int
    patch_values: int = 0
    projector: tuple[int, ...] = ()
    trained: bool = True
    projector_trained: bool = True
    recompute: str = "selective"

    def __post_init__(self) -> None:
        _check_recompute(self.recompute)
        if not 0 <= self.images_real <= self.images_padded:
            raise UserError(
                f"{self.model.name}: {self.images_real} real images do not fit among"
                f" {self.images_padded} padded ones"
            )

    @property
    def needs_gradient(self) -> bool:
        """Whether the LLM must send gradients of the features back."""
        return self.trained or (bool(self.projector) and self.projector_trained)


@dataclasses.dataclass(frozen=True)
class Text:
    """What an LLM does in a step: `rows` of `length` positions run, those of `segments` count.

    `segments` are the lengths of all sequences packed into the rows, images' positions included;
    () stands for rows that are full, one sequence each. The attention that runs is taken to skip
    what is between segments and in padding. `recompute` as for Images. Raises UserError for
    segments that do not fit.
    """

    model: Transformer
    rows: int
    length: int
    segments: tuple[int, ...] = ()
    trained: bool = True
    recompute: str = "selective"

    def __post_init__(self) -> None:
        _check_recompute(self.recompute)
        if min(self.rows, self.length, *self.segments) < 1:
            raise UserError(f"{self.model.name}: rows, length and segments must be positive")
        if not self.segments:
            object.__setattr__(self, "segments", (self.length,) * self.rows)
        if sum(self.segments) > self.rows * self.length or max(self.segments) > self.length:
            raise UserError(
                f"{self.model.name}: segments of {sum(self.segments)} positions, the longest"
                f" {max(self.segments)}, do not fit into {self.rows} rows of {self.length}"
            )


@dataclasses.dataclass(frozen=True)
class StepFlops:
    """Operations of one step on all devices: `model` is what training needs (for MFU), `hardware`
    what runs (for HFU), with recomputation and padding."""

    model: float
    hardware: float

    def __add__(self, other: StepFlops) -> StepFlops:
        return StepFlops(self.model + other.model, self.hardware + other.hardware)


def step_flops(text: Text, images: Sequence[Images] = (), exact: bool = False) -> StepFlops:
    """Operations of a step of an LLM with any number of encoders; `exact` counts causal attention
    by half.

    A trained part counts one forward and two in its backward: gradients of its input and of its
    weights. A frozen one has no gradients of weights, and those of its input only if something
    before it is trained; so a frozen encoder runs a forward only, and a frozen LLM behind a trained
    projector two forwards' worth in its matrices. Attention has no weights: its backward takes two
    forwards wherever there is one. Nothing is before the pixels, so a patch embedding, and the
    projector's first matrix behind a frozen encoder, have gradients of weights only.
    """
    before = any(part.needs_gradient for part in images)
    total = _llm(text, before, exact)
    for part in images:
        total += _encoder(part, exact)
    return total


def mfu(
    flops: StepFlops, seconds: float, devices: int, chip: Chip, dtype: str = "bfloat16"
) -> float:
    """Model FLOPs utilisation: the share of the devices' peak that a step of `seconds` needed."""
    return flops.model / (seconds * devices * chip.flops[dtype])


def hfu(
    flops: StepFlops, seconds: float, devices: int, chip: Chip, dtype: str = "bfloat16"
) -> float:
    """Hardware FLOPs utilisation: the share of the devices' peak that ran in a step."""
    return flops.hardware / (seconds * devices * chip.flops[dtype])


def _attention(model: Transformer, pairs: float, causal: bool) -> float:
    return 4 * model.width * pairs / (2 if causal else 1)


def _encoder(part: Images, exact: bool) -> StepFlops:
    model = part.model

    def others(images: int) -> float:
        positions = images * part.tokens
        total = embedding_flops_forward(model, positions, part.patch_values) * (1 + part.trained)
        needed = part.trained
        for a, b in itertools.pairwise(part.projector):
            total += 2 * positions * a * b * (1 + needed + part.projector_trained)
            needed = needed or part.projector_trained
        return total

    def layers(images: int, recompute: str) -> float:
        squares = images * part.tokens**2
        return _layers(
            model, images * part.tokens, squares, part.trained, part.trained, recompute, exact
        )

    real, padded = part.images_real, part.images_padded
    return StepFlops(
        others(real) + layers(real, "none"), others(padded) + layers(padded, part.recompute)
    )


def _llm(part: Text, before: bool, exact: bool) -> StepFlops:
    model, squares = part.model, sum(s**2 for s in part.segments)
    inward = part.trained or before

    def count(positions: int, recompute: str) -> float:
        head = head_flops_forward(model, positions) * (1 + inward + part.trained)
        return head + _layers(model, positions, squares, inward, part.trained, recompute, exact)

    return StepFlops(
        count(sum(part.segments), "none"), count(part.rows * part.length, part.recompute)
    )


def _layers(
    model: Transformer,
    positions: int,
    squares: int,
    inward: bool,
    trained: bool,
    recompute: str,
    exact: bool,
) -> float:
    """All layers, forward and backward; `inward` says whether gradients of their inputs are
    needed."""
    matrices = 2 * positions * model.layer_parameters
    attention = _attention(model, squares, exact and model.causal)
    again = inward * (recompute == "full")
    matrices *= 1 + inward + trained + again
    attention *= 1 + again + inward * (2 + _SCORES_AGAIN[recompute])
    return model.layers * (matrices + attention)


def _check_recompute(recompute: str) -> None:
    if recompute not in _SCORES_AGAIN:
        raise UserError(f"no recompute {recompute!r}, only {', '.join(_SCORES_AGAIN)}")
