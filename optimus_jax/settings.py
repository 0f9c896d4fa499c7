"""Dataclasses from plain mappings of settings, and what is wrong with the settings in words."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import Any

from optimus_jax.config_checks import did_you_mean


def build(kind: type, values: Mapping[str, Any], path: str, errors: list[str]) -> Any:
    """A dataclass from a mapping with the same keys. Wrong keys and types become errors; what is
    right is then returned without the rest, so that the other checks can still run."""
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    before, made = len(errors), {}
    for key in values:
        if key not in fields:
            errors.append(f"{path}.{key}: unknown{did_you_mean(key, list(fields))}")
    for name, field in fields.items():
        wanted, where = hints[name], f"{path}.{name}"
        if name not in values:
            if field.default_factory is not dataclasses.MISSING:
                made[name] = field.default_factory()
            elif field.default is dataclasses.MISSING:
                errors.append(f"{where}: missing")
            continue
        value = values[name]
        if dataclasses.is_dataclass(wanted):
            if not isinstance(value, Mapping):
                errors.append(f"{where}: expected a group of settings, got {value!r}")
                continue
            made[name] = build(wanted, value, where, errors)  # type: ignore[arg-type]
            continue
        if typing.get_origin(wanted) is dict:
            if not isinstance(value, Mapping):
                errors.append(f"{where}: expected named groups of settings, got {value!r}")
                continue
            one = typing.get_args(wanted)[1]
            made[name] = {key: build(one, value[key], f"{where}.{key}", errors) for key in value}
            continue
        if wanted is float and type(value) is int:
            value = float(value)
        if type(value) is not wanted:
            errors.append(f"{where}: expected {NOUNS[wanted]}, got {value!r}")
            continue
        if wanted is float and not math.isfinite(value):
            errors.append(f"{where}: expected a finite number, got {value!r}")
            continue
        made[name] = value
    if len(errors) == before:
        return kind(**made)
    incomplete: Any = object.__new__(kind)
    vars(incomplete).update(made)
    return incomplete


def with_defaults(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a dataclass with the defaults of those that are left out, in all groups."""
    hints, made = typing.get_type_hints(kind), dict(values)
    for field in dataclasses.fields(kind):
        name, wanted = field.name, hints[field.name]
        if dataclasses.is_dataclass(wanted):
            if field.default is not dataclasses.MISSING:
                made.setdefault(name, {})
            if isinstance(made.get(name), Mapping):
                made[name] = with_defaults(wanted, made[name])  # type: ignore[arg-type]
        elif typing.get_origin(wanted) is dict:
            groups = made.setdefault(name, {})
            if isinstance(groups, Mapping):
                one = typing.get_args(wanted)[1]
                made[name] = {
                    key: with_defaults(one, group) if isinstance(group, Mapping) else group
                    for key, group in groups.items()
                }
        elif field.default is not dataclasses.MISSING:
            made.setdefault(name, field.default)
    return made


NOUNS = {int: "a whole number", float: "a number", str: "a word", bool: "True or False"}
