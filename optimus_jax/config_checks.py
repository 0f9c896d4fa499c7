"""What a configuration must satisfy, as errors in the user's words with valid values near by."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from optimus_jax.cost.hardware import HARDWARE
from optimus_jax.data import tokens
from optimus_jax.data.digits import SIDE as DIGIT_SIDE
from optimus_jax.schedule.methods import METHODS
from optimus_jax.schedule.pipeline import ORDERS


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, one line for each error."""

    def __init__(self, errors: list[str]):
        self.errors = errors
        super().__init__("\n".join(errors))


def did_you_mean(word: str, valid: list[str]) -> str:
    """A hint that names the nearest valid words, and all of them."""
    near = difflib.get_close_matches(word, valid, n=2, cutoff=0.5)
    hint = f", did you mean {' or '.join(near)}?" if near else ""
    return f"{hint} (valid: {', '.join(valid)})"


def _at(config: Any, path: str) -> Any:
    """The value at a dotted path, None if it is missing or of the wrong type."""
    for name in path.split("."):
        config = getattr(config, name, None)
    return config


def _positive(config: Any) -> Iterator[str]:
    groups = {
        "model": ("image_height", "image_width", "text_length", "projector_hidden"),
        "model.encoder": ("layers", "width", "heads", "hidden", "patch"),
        "model.llm": ("layers", "width", "heads", "hidden"),
        "data": ("digits_low", "digits_high"),
        "parallel": ("dp", "pp", "chunks", "microbatches"),
        "train": ("batch", "steps", "log_every", "save_every", "keep", "clip"),
    }
    paths = [f"{group}.{name}" for group, names in groups.items() for name in names]
    for path in paths:
        value = _at(config, path)
        if value is not None and value <= 0:
            yield f"config.{path}: must be positive, got {value}"
    examples = _at(config, "evaluate_examples")
    if examples is not None and examples < 2:  # one cannot be paired with another's caption
        yield f"config.evaluate_examples: must be at least 2, got {examples}"


def _words(config: Any) -> Iterator[str]:
    valid = {
        "hardware": list(HARDWARE),
        "model.dtype": ["float32", "bfloat16"],
        "data.name": ["digits"],
        "parallel.order": list(ORDERS),
        "parallel.method": list(METHODS),
    }
    for path, words in valid.items():
        word = _at(config, path)
        if word is not None and word not in words:
            yield f"config.{path}: unknown {word!r}{did_you_mean(word, words)}"


def _heads(name: str, config: Any) -> Iterator[str]:
    part = getattr(config.model, name)
    if min(part.width, part.heads) > 0 and part.width % part.heads:
        yield (
            f"config.model.{name}: width {part.width} does not divide into {part.heads} heads;"
            f" {_divisors(part.heads, part.width)} heads would"
        )


def _patches(side: str, config: Any) -> Iterator[str]:
    pixels, patch = getattr(config.model, side), config.model.encoder.patch
    if min(pixels, patch) > 0 and pixels % patch:
        yield (
            f"config.model.{side}: {pixels} pixels do not divide into patches of {patch};"
            f" {_multiples(pixels, patch)} would"
        )


def _digits(config: Any) -> Iterator[str]:
    low, high = config.data.digits_low, config.data.digits_high
    if low > high:
        yield f"config.data: digits_low {low} is above digits_high {high}"


def _room(config: Any) -> Iterator[str]:
    model, digits = config.model, config.data.digits_high
    if model.image_height < DIGIT_SIDE or model.image_width < DIGIT_SIDE * digits:
        yield (
            f"config.model: a picture of {model.image_height} x {model.image_width} pixels has no"
            f" room for {digits} digits; the smallest is {DIGIT_SIDE} x {DIGIT_SIDE * digits}"
        )


def _text(config: Any) -> Iterator[str]:
    length, digits = config.model.text_length, config.data.digits_high
    needed = 2 * digits + 1  # start, digits with spaces between, end
    if length < needed:
        yield (
            f"config.model.text_length: {length} is too short for {digits} digits, which take"
            f" {needed}"
        )


def _data(config: Any) -> Iterator[str]:
    """What the pictures and captions of the data set fix."""
    fixed = {"image_channels": 1, "image_token": tokens.IMAGE}
    for name, wanted in fixed.items():
        if _at(config, f"model.{name}") not in (None, wanted):
            found = getattr(config.model, name)
            yield f"config.model.{name}: the data set has {wanted}, not {found}"
    vocabulary = _at(config, "model.vocabulary")
    if vocabulary is not None and vocabulary < tokens.SIZE:
        yield f"config.model.vocabulary: {vocabulary} is too small, captions take {tokens.SIZE}"


def _batch(config: Any) -> Iterator[str]:
    batch, p = config.train.batch, config.parallel
    parts = p.dp * p.microbatches * p.pp
    if min(batch, parts) > 0 and batch % parts:
        yield (
            f"config.train.batch: {batch} rows do not divide into dp {p.dp} x microbatches"
            f" {p.microbatches} x encoder units {p.pp} (one for each stage) = {parts} parts;"
            f" {_multiples(batch, parts)} would"
        )


def _stages(config: Any) -> Iterator[str]:
    p, layers = config.parallel, config.model.llm.layers
    if layers < p.pp * p.chunks:
        yield (
            f"config.parallel: pp {p.pp} x chunks {p.chunks} = {p.pp * p.chunks} virtual stages,"
            f" but the LLM has {layers} layers; each needs at least one"
        )


def _chunks(config: Any) -> Iterator[str]:
    p = config.parallel
    if p.chunks > 1 and p.order == "gpipe":
        yield f"config.parallel.order: {p.order} runs one chunk, not {p.chunks}; 1f1b runs several"
    elif p.chunks > 1 and min(p.microbatches, p.pp) > 0 and p.microbatches % p.pp:
        yield (
            f"config.parallel.microbatches: interleaved 1F1B on {p.pp} stages takes multiples of"
            f" {p.pp}, not {p.microbatches}; {_multiples(p.microbatches, p.pp)} would do"
        )


def _warmup(config: Any) -> Iterator[str]:
    warmup, steps = config.train.warmup, config.train.steps
    if not 0 <= warmup < steps:
        yield (
            f"config.train.warmup: {warmup} steps must be at least 0 and fewer than the {steps} of"
            " the run"
        )


def _limits(config: Any) -> Iterator[str]:
    for name in ("learning_rate", "weight_decay", "seed"):
        value = _at(config, f"train.{name}")
        if value is not None and value < 0:
            yield f"config.train.{name}: must not be negative, got {value}"
    seed = _at(config, "train.seed")
    if seed is not None and seed > LARGEST_SEED:
        yield f"config.train.seed: must be at most {LARGEST_SEED}, got {seed}"


LARGEST_SEED = 2**32 - 1  # jax's keys take 32 bits of it

CHECKS: tuple[Callable[[Any], Iterator[str]], ...] = (
    *(_positive, _words),
    *(partial(_heads, name) for name in ("encoder", "llm")),
    *(partial(_patches, side) for side in ("image_height", "image_width")),
    *(_digits, _room, _text, _data, _batch, _stages, _chunks, _warmup, _limits),
)


def _multiples(number: int, of: int) -> str:
    """The positive multiples of `of` next to `number`, below and above, in words."""
    below = number // of * of
    return " or ".join(str(n) for n in (below, below + of) if n > 0)


def _divisors(number: int, of: int) -> str:
    """The divisors of `of` next to `number`, below and above, in words."""
    divisors = [n for n in range(1, of + 1) if of % n == 0]
    near = [*[n for n in divisors if n < number][-1:], *[n for n in divisors if n > number][:1]]
    return " or ".join(map(str, near))
