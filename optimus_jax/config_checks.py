"""What a configuration must satisfy, as errors in the user's words with valid values near by."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
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


BLOCKS = ("vit", "gpt", "vit22b", "llama")  # those of models/blocks.py, which imports jax
INPUTS = ("image", "audio")
POLICIES = ("full", "selective", "none")  # those of models/region.py
GRADIENTS = ("float32", "bfloat16")


def at(config: Any, path: str) -> Any:
    """The value at a dotted path, None if it is missing or of the wrong type."""
    for name in path.split("."):
        config = config.get(name) if isinstance(config, dict) else getattr(config, name, None)
    return config


def encoders(config: Any) -> Iterator[tuple[str, str]]:
    """The places in the configuration of all encoders, and of their parallel plans."""
    yield "model.encoder", "parallel.encoder"
    for name in at(config, "model.more_encoders") or {}:
        yield f"model.more_encoders.{name}", f"parallel.more_encoders.{name}"


def _positive(config: Any) -> Iterator[str]:
    groups = {
        "model": ("image_height", "image_width", "text_length", "projector_hidden"),
        "model.llm": ("layers", "width", "heads", "hidden"),
        "parallel": ("dp", "pp", "tp", "chunks", "microbatches"),
        "train": ("batch", "steps", "log_every", "save_every", "keep", "clip"),
        "emulate": ("chunk_forward_s", "backward", "encoder", "encoder_backward"),
    }
    for encoder, plan in encoders(config):
        groups |= {encoder: ("layers", "width", "heads", "hidden", "patch"), plan: ("pp", "tp")}
    paths = [f"{group}.{name}" for group, names in groups.items() for name in names]
    for path in paths:
        value = at(config, path)
        if value is not None and value <= 0:
            yield f"config.{path}: must be positive, got {value}"
    examples = at(config, "evaluate_examples")
    if examples is not None and examples < 2:  # one cannot be paired with another's caption
        yield f"config.evaluate_examples: must be at least 2, got {examples}"


def _words(config: Any) -> Iterator[str]:
    valid: dict[str, tuple[str, ...]] = {
        "hardware": tuple(HARDWARE),
        "model.dtype": ("float32", "bfloat16"),
        "model.llm.block": BLOCKS,
        "data.name": tuple(sources.SOURCES),
        "parallel.order": tuple(ORDERS),
        "parallel.method": tuple(METHODS),
        "parallel.recompute": POLICIES,
        "parallel.gradients": GRADIENTS,
    }
    for encoder, plan in encoders(config):
        valid |= {f"{encoder}.block": BLOCKS, f"{encoder}.input": INPUTS}
        valid |= {f"{plan}.recompute": POLICIES}
    for path, words in valid.items():
        word = at(config, path)
        if word is not None and word not in words:
            yield f"config.{path}: unknown {word!r}{did_you_mean(word, list(words))}"


# What modules, the stacked layers of one and a norm in them are called in the weights' names.
RESERVED = "llm", "layers", "qk_norm"


def _names(config: Any) -> Iterator[str]:
    first = next(iter(config.model.encoders))
    for name in config.model.more_encoders:
        if name in (first, *RESERVED):
            yield f"config.model.more_encoders.{name}: the name is taken; any other would do"
        elif not name.isidentifier():
            yield f"config.model.more_encoders: {name!r} must be a name of letters, digits and _"
    valid = list(config.model.more_encoders)
    for name in config.parallel.more_encoders:
        if name not in valid:
            yield (
                f"config.parallel.more_encoders.{name}: model.more_encoders has no such encoder"
                f"{did_you_mean(name, valid)}"
            )


def _heads(config: Any) -> Iterator[str]:
    for path in ("model.llm", *(encoder for encoder, _ in encoders(config))):
        part = at(config, path)
        if part is None or min(part.width, part.heads) <= 0:
            continue
        if part.width % part.heads:
            yield (
                f"config.{path}: width {part.width} does not divide into {part.heads} heads;"
                f" {divisors(part.heads, part.width)} heads would"
            )
        elif part.block == "llama" and part.width // part.heads % 2:
            near = divisors(part.heads, part.width // 2) if part.width % 2 == 0 else ""
            yield (
                f"config.{path}: width {part.width} over {part.heads} heads is"
                f" {part.width // part.heads}, but rotary positions (llama) turn pairs of numbers:"
                f" {f'{near} heads' if near else 'an even width'} would do"
            )


def _groups(config: Any) -> Iterator[str]:
    """Heads of keys and values that groups of heads share."""
    llm = config.model.llm
    if llm.kv_heads < 0:
        yield f"config.model.llm.kv_heads: must not be negative, got {llm.kv_heads}"
    elif llm.kv_heads not in (0, llm.heads) and llm.block != "llama" and llm.block in BLOCKS:
        yield (
            f"config.model.llm.kv_heads: {llm.block} has keys and values for each of its"
            f" {llm.heads} heads, not {llm.kv_heads}; llama can share them"
        )
    elif llm.kv_heads and llm.heads > 0 and llm.heads % llm.kv_heads:
        yield (
            f"config.model.llm.kv_heads: {llm.heads} heads do not share {llm.kv_heads} evenly;"
            f" {divisors(llm.kv_heads, llm.heads)} would do"
        )


def _patches(config: Any) -> Iterator[str]:
    for path, _ in encoders(config):
        encoder, model = at(config, path), config.model
        if encoder is None:
            continue
        audio = encoder.input == "audio"
        sides = ("audio_frames",) if audio else ("image_height", "image_width")
        for side in sides:
            size, patch = at(model, side), encoder.patch
            if size is not None and min(size, patch) > 0 and size % patch:
                noun = "frames" if audio else "pixels"
                more = "" if path == "model.encoder" else f", the patch of {path}"
                yield (
                    f"config.model.{side}: {size} {noun} do not divide into patches of"
                    f" {patch}{more}; {multiples(size, patch)} would"
                )


def _audio(config: Any) -> Iterator[str]:
    """The size of spectrograms, given if and only if an encoder takes them."""
    listens = [path for path, _ in encoders(config) if at(config, f"{path}.input") == "audio"]
    for name in ("audio_frames", "audio_bands"):
        value = at(config, f"model.{name}")
        if listens and value <= 0:
            yield f"config.model.{name}: {listens[0]} takes audio, so it must be positive: {value}"
        elif value and not listens:
            yield f"config.model.{name}: means nothing where no encoder's input is audio"


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
    if at(config, "data.name") in sources.SOURCES:
        fixed["image_channels"] = sources.SOURCES[config.data.name].channels
    for name, wanted in fixed.items():
        if at(config, f"model.{name}") not in (None, wanted):
            found = getattr(config.model, name)
            yield f"config.model.{name}: the data set has {wanted}, not {found}"
    vocabulary = at(config, "model.vocabulary")
    if vocabulary is not None and vocabulary < tokens.SIZE:
        yield f"config.model.vocabulary: {vocabulary} is too small, captions take {tokens.SIZE}"


def _warmup(config: Any) -> Iterator[str]:
    warmup, steps = config.train.warmup, config.train.steps
    if not 0 <= warmup < steps:
        yield (
            f"config.train.warmup: {warmup} steps must be at least 0 and fewer than the {steps} of"
            " the run"
        )


def _limits(config: Any) -> Iterator[str]:
    hidden = at(config, "data.hide_text")
    if hidden is not None and not 0 <= hidden <= 1:
        yield f"config.data.hide_text: a share from 0 to 1, got {hidden}"
    for name in ("learning_rate", "weight_decay", "seed"):
        value = at(config, f"train.{name}")
        if value is not None and value < 0:
            yield f"config.train.{name}: must not be negative, got {value}"
    seed = at(config, "train.seed")
    if seed is not None and seed > LARGEST_SEED:
        yield f"config.train.seed: must be at most {LARGEST_SEED}, got {seed}"


LARGEST_SEED = 2**32 - 1  # jax's keys take 32 bits of it

CHECKS: tuple[Callable[[Any], Iterator[str]], ...] = (
    *(_positive, _words, _names, _heads, _groups, _patches, _audio),
    *(_data, _room, _text, _form, _warmup, _limits),
)


def multiples(number: int, of: int, least: int = 1) -> str:
    """The multiples of `of` next to `number`, below and above, from `least` on, in words."""
    below = number // of * of
    above = max(below + of, -(-least // of) * of)
    return " or ".join(str(n) for n in dict.fromkeys((below, above)) if n >= least)


def divisors(number: int, of: int) -> str:
    """The divisors of `of` next to `number`, below and above, in words."""
    return nearest(number, [n for n in range(1, of + 1) if of % n == 0])


def nearest(number: int, valid: list[int]) -> str:
    """Of sorted numbers those next to `number`, below and above, in words."""
    near = [*[n for n in valid if n < number][-1:], *[n for n in valid if n > number][:1]]
    return " or ".join(map(str, near))
