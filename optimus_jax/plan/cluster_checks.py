"""What a cluster's configuration must satisfy, as errors in the user's words; how it is made."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from optimus_jax.config_checks import ConfigError, did_you_mean
from optimus_jax.cost.hardware import HARDWARE
from optimus_jax.cost.memory import POLICIES
from optimus_jax.cost.transformer import MODELS
from optimus_jax.plan.cluster import Cluster
from optimus_jax.settings import build


def is_cluster(values: Mapping[str, Any]) -> bool:
    """Whether a configuration asks for a cluster's plan (it names gpus) or is a training run's."""
    return "gpus" in values


def from_config_dict(values: Mapping[str, Any]) -> Cluster:
    """The checked configuration. Raises ConfigError with every error found."""
    errors: list[str] = []
    built: Cluster = build(Cluster, values, "config", errors)
    for check in (_words, _positive, _models, _division):
        # a value of the wrong type is reported once, by build
        with contextlib.suppress(AttributeError, TypeError, ZeroDivisionError):
            errors += check(built)
    if errors:
        raise ConfigError(errors)
    return built


def _words(c: Cluster) -> Iterator[str]:
    if c.hardware not in HARDWARE:
        yield f"config.hardware: unknown {c.hardware!r}{did_you_mean(c.hardware, list(HARDWARE))}"
    for path, spec in _specs(c):
        if spec.recompute not in POLICIES:
            hint = did_you_mean(spec.recompute, list(POLICIES))
            yield f"{path}.recompute: unknown {spec.recompute!r}{hint}"


def _specs(c: Cluster) -> Iterator[tuple[str, Any]]:
    yield "config.llm", c.llm
    for name, spec in c.encoders.items():
        yield f"config.encoders.{name}", spec


def _positive(c: Cluster) -> Iterator[str]:
    for path, value in (
        ("gpus", c.gpus),
        ("batch", c.batch),
        ("llm.length", c.llm.length),
        ("parallel.microbatch", c.parallel.microbatch),
        *((f"encoders.{n}.tokens", s.tokens) for n, s in c.encoders.items()),
        *((f"encoders.{n}.image_tokens", s.image_tokens) for n, s in c.encoders.items()),
    ):
        if value <= 0:
            yield f"config.{path}: must be positive, got {value}"
    for name in ("dp", "pp", "tp", "chunks"):
        if getattr(c.parallel, name) < 0:
            value = getattr(c.parallel, name)
            yield f"config.parallel.{name}: must be positive, or 0 to be searched, got {value}"
    a = c.assume
    limits: tuple[tuple[str, float, float, float], ...] = (
        ("efficiency", a.efficiency, 0.0, 1.0),
        ("all_gather_share", a.all_gather_share, 0.0, 1.0),
        ("slot_usable", a.slot_usable, 0.0, 1.0),
        ("slot_contention", a.slot_contention, 1.0, 100.0),
        ("llm_backward", a.llm_backward, 1.0, 10.0),
        ("p2p_busy_s", a.p2p_busy_s, 0.0, 1e3),
        ("tp_collective_s", a.tp_collective_s, 0.0, 1e3),
        ("vit_kernels", a.vit_kernels, 1, 1000),
        ("memory_share", a.memory_share, 0.01, 1.0),
    )
    for name, amount, least, most in limits:
        if not least <= amount <= most:
            yield f"config.assume.{name}: must be from {least:g} to {most:g}, got {amount:g}"
    for way in ("forward", "backward"):
        seconds = getattr(a, f"vit_{way}_s")
        if seconds and seconds <= 4 * a.vit_collective_s:
            yield (
                f"config.assume.vit_{way}_s: {seconds:g} s leaves nothing beside 4 collectives of"
                f" {a.vit_collective_s:g} s (vit_collective_s)"
            )
    if bool(a.vit_forward_s) != bool(a.vit_backward_s):
        yield (
            "config.assume: vit_forward_s and vit_backward_s are given together, got"
            f" {a.vit_forward_s:g} and {a.vit_backward_s:g}"
        )


def _models(c: Cluster) -> Iterator[str]:
    for path, spec in _specs(c):
        sizes = {name: getattr(spec, name) for name in ("layers", "width", "heads", "hidden")}
        if not any(sizes.values()):
            if spec.name not in MODELS:
                hint = did_you_mean(spec.name, list(MODELS))
                yield f"{path}.name: no model {spec.name!r}{hint}; or give its sizes"
        elif min(sizes.values()) <= 0:
            given = ", ".join(f"{name} {value}" for name, value in sizes.items())
            yield f"{path}: a model of your own needs layers, width, heads and hidden, got {given}"


def _division(c: Cluster) -> Iterator[str]:
    p = c.parallel
    given = [(name, getattr(p, name)) for name in ("dp", "pp", "tp") if getattr(p, name)]
    product = 1
    for _, value in given:
        product *= value
    words = " x ".join(f"{name} {value}" for name, value in given)
    if len(given) == 3 and product != c.gpus:
        yield f"config.parallel: {words} = {product} devices, config.gpus is {c.gpus}"
    elif given and c.gpus % product:
        yield f"config.parallel: {words} = {product} does not divide config.gpus, {c.gpus}"
    if p.dp and c.batch % (p.dp * p.microbatch):
        yield (
            f"config.batch: {c.batch} is no multiple of dp {p.dp} x microbatch {p.microbatch}"
            f" = {p.dp * p.microbatch}"
        )
    for name, spec in c.encoders.items():
        if spec.tokens % spec.image_tokens:
            yield (
                f"config.encoders.{name}: {spec.tokens} tokens are no whole number of images of"
                f" {spec.image_tokens} (image_tokens)"
            )
        if spec.in_flight < 0:
            yield f"config.encoders.{name}.in_flight: 0 or more, got {spec.in_flight}"
        for part in ("stages", "tp"):
            own, of = getattr(spec, part), {"stages": "pp", "tp": "tp"}[part]
            whole = getattr(p, of)
            if own < 0 or (own and whole and whole % own):
                yield f"config.encoders.{name}.{part}: {own} does not divide parallel.{of}, {whole}"
