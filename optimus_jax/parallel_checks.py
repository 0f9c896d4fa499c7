"""What the parallel plan of a configuration must satisfy, as errors in the user's words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from optimus_jax.config_checks import at, divisors, encoders, multiples, nearest
from optimus_jax.data import sources, tokens
from optimus_jax.schedule.methods import FUSING


class Placed(NamedTuple):
    """Where an encoder and its parallel plan stand in the configuration, and the plan."""

    model: str
    path: str
    plan: Any


def _placed(config: Any) -> Iterator[Placed]:
    """The encoders that have a plan: all, unless the configuration has further errors."""
    for model, path in encoders(config):
        plan = at(config, path)
        if plan is not None:
            yield Placed(model, path, plan)


def _batch(config: Any) -> Iterator[str]:
    """Rows of a microbatch are shared evenly by the replicas that each encoder has beside one LLM
    pipeline: its pipelines, and the tensor shards that it does not use."""
    batch, p = config.train.batch, config.parallel
    counts = {}
    for _, path, plan in _placed(config):
        if min(p.pp, p.tp, plan.pp, plan.tp) <= 0:
            return
        if p.pp % plan.pp == 0 and p.tp % plan.tp == 0:
            counts[path] = p.pp // plan.pp * (p.tp // plan.tp)
    units = math.lcm(*counts.values())
    parts = p.dp * p.microbatches * units
    if min(batch, parts) > 0 and batch % parts:
        each = sorted(set(counts.values()))
        meaning = "one for each replica of an encoder beside the pipeline"
        if len(each) > 1:
            meaning = f"the encoders have {' and '.join(map(str, each))} replicas beside a pipeline"
        yield (
            f"config.train.batch: {batch} rows do not divide into dp {p.dp} x microbatches"
            f" {p.microbatches} x encoder units {units} ({meaning}) = {parts} parts;"
            f" {multiples(batch, parts)} would"
        )


def _stages(config: Any) -> Iterator[str]:
    p, layers = config.parallel, config.model.llm.layers
    if layers < p.pp * p.chunks:
        yield (
            f"config.parallel: pp {p.pp} x chunks {p.chunks} = {p.pp * p.chunks} virtual stages,"
            f" but the LLM has {layers} layers; each needs at least one"
        )


def _encoder_stages(config: Any) -> Iterator[str]:
    for model, path, plan in _placed(config):
        layers = at(config, f"{model}.layers")
        if layers is not None and 0 < layers < plan.pp:
            yield (
                f"config.{path}.pp: {plan.pp} stages, but {model} has {layers} layers; each needs"
                " at least one"
            )


def _chunks(config: Any) -> Iterator[str]:
    p = config.parallel
    if p.chunks > 1 and p.order == "gpipe":
        yield f"config.parallel.order: {p.order} runs one chunk, not {p.chunks}; 1f1b runs several"
    elif p.chunks > 1 and min(p.microbatches, p.pp) > 0 and p.microbatches % p.pp:
        yield (
            f"config.parallel.microbatches: interleaved 1F1B on {p.pp} stages takes multiples of"
            f" {p.pp}, not {p.microbatches}; {multiples(p.microbatches, p.pp)} would do"
        )


def _refined(config: Any) -> Iterator[str]:
    """One grid of devices has the sizes of all modules: each encoder's divide the LLM's, and of two
    encoders' one divides the other (parallel/mesh.py)."""
    for name, noun in (("pp", "stages"), ("tp", "tensor shards")):
        whole = getattr(config.parallel, name)
        before: dict[str, int] = {}
        for _, path, plan in _placed(config):
            size = getattr(plan, name)
            if min(whole, size) <= 0:
                continue
            if whole % size:
                yield (
                    f"config.{path}.{name}: {size} {noun} do not divide the LLM's {whole};"
                    f" {divisors(size, whole)} would"
                )
                continue
            clash = {p: n for p, n in before.items() if size % n and n % size}
            if clash:
                near = [n for n in range(1, whole + 1) if whole % n == 0]
                near = [n for n in near if not any(n % m and m % n for m in before.values())]
                other, its = next(iter(clash.items()))
                yield (
                    f"config.{path}.{name}: of {size} and {other}'s {its} one must divide the"
                    f" other; {nearest(size, near)} would do"
                )
                continue
            before[path] = size


def _shards(config: Any) -> Iterator[str]:
    """Heads, hidden widths and the vocabulary are cut over tensor shards."""
    model, tp = config.model, config.parallel.tp
    sizes = {"heads": model.llm.heads, "hidden": model.llm.hidden}
    if model.llm.kv_heads > 0:
        sizes["kv_heads"] = model.llm.kv_heads
    yield from _cut("parallel.tp", tp, "the LLM's", sizes)
    if tp > 0 and model.vocabulary % tp:
        yield (
            f"config.model.vocabulary: {model.vocabulary} does not divide among tp {tp};"
            f" {multiples(model.vocabulary, tp, tokens.SIZE)} would"
        )
    for part, path, plan in _placed(config):
        encoder = at(config, part)
        if encoder is not None:
            sizes = {"heads": encoder.heads, "hidden": encoder.hidden}
            sizes["projector_hidden"] = model.projector_hidden
            yield from _cut(f"{path}.tp", plan.tp, f"{part}'s", sizes, within=tp)


def _cut(path: str, tp: int, whose: str, sizes: dict[str, int], within: int = 0) -> Iterator[str]:
    """`within`: what the tensor shards must divide as well, 0 for anything."""
    wrong = [f"{name} {n}" for name, n in sizes.items() if tp > 0 and n > 0 and n % tp]
    if wrong:
        most = math.gcd(within, *sizes.values())
        yield (
            f"config.{path}: {whose} {' and '.join(wrong)} do not divide among {tp} tensor shards;"
            f" {divisors(tp, most)} would do"
        )


def _sequence(config: Any) -> Iterator[str]:
    """Sequence parallelism cuts positions over tensor shards."""
    model, p = config.model, config.parallel
    if p.sequence_parallel and p.tp > 0 and model.sequence % p.tp:
        least = model.image_tokens + _least_text(config)
        near = multiples(model.sequence, p.tp, least)
        lengths = " or ".join(str(int(n) - model.image_tokens) for n in near.split(" or "))
        yield (
            f"config.model.text_length: {model.image_tokens} image tokens and {model.text_length}"
            f" of text do not divide among tp {p.tp}; {lengths} of text would, or"
            " config.parallel.sequence_parallel=False"
        )
    for part, path, plan in _placed(config):
        if not plan.sequence_parallel or plan.tp <= 0:
            continue
        first, last = next(iter(model.encoders)), part.rpartition(".")[2]
        count = model.features_of(first if part == "model.encoder" else last)
        if count % plan.tp:
            yield (
                f"config.{path}.tp: {count} positions of {part} do not divide among {plan.tp}"
                f" tensor shards; {divisors(plan.tp, math.gcd(count, p.tp))} would, or"
                f" config.{path}.sequence_parallel=False"
            )


def _least_text(config: Any) -> int:
    """Positions that the data set's longest caption takes."""
    if at(config, "data.name") not in sources.SOURCES:
        return 1
    return int(sources.make(config.data).longest) + 2  # start and end


def _cap(config: Any) -> Iterator[str]:
    p = config.parallel
    if p.encoder_cap < 0:
        yield f"config.parallel.encoder_cap: must not be negative, got {p.encoder_cap}"
    elif 0 < p.encoder_cap < p.microbatches and p.method == "phased":
        yield (
            f"config.parallel.encoder_cap: {p.method} keeps encoder activations of all"
            f" {p.microbatches} microbatches, not of {p.encoder_cap}; {p.microbatches} would do, or"
            " the method filled"
        )


def _balanced(config: Any) -> Iterator[str]:
    count = len(config.model.more_encoders) + 1
    if config.parallel.method == "balanced" and count > 1:
        yield (
            f"config.parallel.method: balanced runs one encoder, the model has {count}; filled"
            " runs any number"
        )


def _fuse(config: Any) -> Iterator[str]:
    p = config.parallel
    if p.fuse and p.tp == 1:
        yield (
            "config.parallel.fuse: tp 1 has no tensor-parallel collectives to hide encoder work"
            " behind; tp 2 or more has, or fuse=False"
        )
    elif p.fuse and p.method not in FUSING:
        yield (
            f"config.parallel.fuse: {p.method} makes no fused tasks; {' and '.join(FUSING)} do, or"
            " fuse=False"
        )


CHECKS: tuple[Callable[[Any], Iterator[str]], ...] = (
    *(_batch, _stages, _encoder_stages, _chunks, _refined, _shards, _sequence, _cap, _balanced),
    _fuse,
)
