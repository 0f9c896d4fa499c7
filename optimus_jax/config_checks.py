"""What a configuration must satisfy, as errors in the user's words with valid values near by."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from optimus_jax.cost.hardware import HARDWARE
from optimus_jax.data import sources, tokens
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
        "parallel": ("dp", "pp", "chunks", "microbatches"),
        "train": ("batch", "steps", "log_every", "save_every", "keep", "clip"),
    }
    paths = [f"{group}.{name}" for group, names in groups.items() for name in names]
    for path in paths:
        value = _at(config, path)
        if value is not None and value <= 0:
            yield f"config.{path}: must be positive, got {value}"
    for name in ("chunk_forward_s", "backward", "encoder", "encoder_backward"):
        value = _at(config, f"emulate.{name}")
        if value is not None and value <= 0:
            yield f"config.emulate.{name}: must be positive, got {value}"
    examples = _at(config, "evaluate_examples")
    if examples is not None and examples < 2:  # one cannot be paired with another's caption
        yield f"config.evaluate_examples: must be at least 2, got {examples}"


def _words(config: Any) -> Iterator[str]:
    valid = {
        "hardware": list(HARDWARE),
        "model.dtype": ["float32", "bfloat16"],
        "data.name": list(sources.SOURCES),
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


def _source(config: Any) -> Any:
    """The data set, None if its name is unknown; AttributeError if a setting of it is missing."""
    return sources.make(config.data) if config.data.name in sources.SOURCES else None


def _data(config: Any) -> Iterator[str]:
    """Settings of the data set, and of others that it does not have."""
    source, data = _source(config), config.data
    if source is None:
        return
    for error in source.errors():
        yield f"config.{error}"
    for name in source.unused:
        if getattr(data, name):
            yield f"config.data.{name}: means nothing for the data set {data.name!r}"


def _room(config: Any) -> Iterator[str]:
    model, source = config.model, _source(config)
    if source is None:
        return
    height, width = source.smallest
    if model.image_height < height or model.image_width < width:
        yield (
            f"config.model: a picture of {model.image_height} x {model.image_width} pixels has no"
            f" room for {source.contents}; the smallest is {height} x {width}"
        )


def _text(config: Any) -> Iterator[str]:
    length, source = config.model.text_length, _source(config)
    if source is not None and length < source.longest + 2:  # start and end
        yield (
            f"config.model.text_length: {length} is too short for {source.contents}, which take"
            f" {source.longest + 2}"
        )


def _form(config: Any) -> Iterator[str]:
    """What the pictures and captions of the data set fix."""
    fixed = {"image_token": tokens.IMAGE}
    if _at(config, "data.name") in sources.SOURCES:
        fixed["image_channels"] = sources.SOURCES[config.data.name].channels
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
    hidden = _at(config, "data.hide_text")
    if hidden is not None and not 0 <= hidden <= 1:
        yield f"config.data.hide_text: a share from 0 to 1, got {hidden}"
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
    *(_data, _room, _text, _form, _batch, _stages, _chunks, _warmup, _limits),
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
