"""What a configuration must satisfy, as errors in the user's words with valid values near by."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Any

from optimus_jax.cost.hardware import HARDWARE
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


def _positive(config: Any) -> Iterator[str]:
    groups = {
        "model": (config.model, ("image_height", "image_width", "text_length", "projector_hidden")),
        "model.encoder": (config.model.encoder, ("layers", "width", "heads", "hidden", "patch")),
        "model.llm": (config.model.llm, ("layers", "width", "heads", "hidden")),
        "data": (config.data, ("digits_low", "digits_high")),
        "parallel": (config.parallel, ("dp", "pp", "chunks", "microbatches")),
        "train": (config.train, ("batch", "steps", "log_every", "save_every", "keep", "clip")),
    }
    for path, (group, names) in groups.items():
        for name in names:
            value = getattr(group, name, 1)
            if value <= 0:
                yield f"config.{path}.{name}: must be positive, got {value}"
    if config.evaluate_examples <= 0:
        yield f"config.evaluate_examples: must be positive, got {config.evaluate_examples}"


def _words(config: Any) -> Iterator[str]:
    valid = {
        "hardware": (config.hardware, list(HARDWARE)),
        "model.dtype": (config.model.dtype, ["float32", "bfloat16"]),
        "data.name": (config.data.name, ["digits"]),
        "parallel.order": (config.parallel.order, list(ORDERS)),
        "parallel.method": (config.parallel.method, list(METHODS)),
    }
    for path, (word, words) in valid.items():
        if word not in words:
            yield f"config.{path}: unknown {word!r}{did_you_mean(word, words)}"


def _heads(config: Any) -> Iterator[str]:
    for name in ("encoder", "llm"):
        part = getattr(config.model, name)
        if part.width % part.heads:
            yield (
                f"config.model.{name}: width {part.width} does not divide into {part.heads} heads;"
                f" {_near(part.heads, lambda n: part.width % n == 0)} heads would"
            )


def _pictures(config: Any) -> Iterator[str]:
    model, data = config.model, config.data
    for side in ("image_height", "image_width"):
        pixels, patch = getattr(model, side), model.encoder.patch
        if pixels % patch:
            yield (
                f"config.model.{side}: {pixels} pixels do not divide into patches of {patch};"
                f" {_near(pixels, lambda n: n % patch == 0)} would"
            )
    if data.digits_low > data.digits_high:
        yield (
            f"config.data: digits_low {data.digits_low} is above digits_high {data.digits_high}"
        )
    if model.image_height < DIGIT_SIDE or model.image_width < DIGIT_SIDE * data.digits_high:
        yield (
            f"config.model: a picture of {model.image_height} x {model.image_width} pixels has no"
            f" room for {data.digits_high} digits; the smallest is {DIGIT_SIDE} x"
            f" {DIGIT_SIDE * data.digits_high}"
        )
    needed = 2 * data.digits_high + 1  # start, digits with spaces between, end
    if model.text_length < needed:
        yield (
            f"config.model.text_length: {model.text_length} is too short for"
            f" {data.digits_high} digits, which take {needed}"
        )


def _batch(config: Any) -> Iterator[str]:
    batch, p = config.train.batch, config.parallel
    parts = p.dp * p.microbatches * p.pp
    if batch % parts:
        yield (
            f"config.train.batch: {batch} rows do not divide into dp {p.dp} x microbatches"
            f" {p.microbatches} x encoder units {p.pp} (one for each stage) = {parts} parts;"
            f" {_near(batch, lambda n: n % parts == 0)} would"
        )


def _stages(config: Any) -> Iterator[str]:
    p, layers = config.parallel, config.model.llm.layers
    if layers < p.pp * p.chunks:
        yield (
            f"config.parallel: pp {p.pp} x chunks {p.chunks} = {p.pp * p.chunks} virtual stages,"
            f" but the LLM has {layers} layers; each needs at least one"
        )
    if p.chunks > 1 and p.order != "1f1b":
        yield f"config.parallel.order: {p.order} runs one chunk, not {p.chunks}; 1f1b runs several"
    elif p.chunks > 1 and p.microbatches % p.pp:
        yield (
            f"config.parallel.microbatches: interleaved 1F1B on {p.pp} stages takes multiples of"
            f" {p.pp}, not {p.microbatches};"
            f" {_near(p.microbatches, lambda n: n % p.pp == 0)} would do"
        )


def _training(config: Any) -> Iterator[str]:
    t = config.train
    if not 0 <= t.warmup < t.steps:
        yield f"config.train.warmup: {t.warmup} steps must be fewer than the {t.steps} of the run"
    for name in ("learning_rate", "weight_decay", "seed"):
        if getattr(t, name) < 0:
            yield f"config.train.{name}: must not be negative, got {getattr(t, name)}"


CHECKS: tuple[Callable[[Any], Iterator[str]], ...] = (
    *(_positive, _words, _heads, _pictures, _batch, _stages, _training),
)


def _near(number: int, valid: Callable[[int], bool]) -> str:
    """The valid numbers next to `number`, below and above, in words."""
    below = next((n for n in range(number, 0, -1) if valid(n)), None)
    above = next((n for n in range(number, 4 * number + 1025) if valid(n)), None)
    found = sorted({n for n in (below, above) if n is not None})
    return " or ".join(map(str, found)) or "no number near it"
