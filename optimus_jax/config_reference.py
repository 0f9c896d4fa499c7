"""python -m optimus_jax.config_reference: docs/configuration.md, made from the dataclasses."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterator
from typing import Any

from optimus_jax import config as run
from optimus_jax.plan import cluster

PARTS: dict[str, tuple[tuple[str, type], ...]] = {
    "A training run": (
        ("config", run.Config),
        ("config.model", run.ModelConfig),
        ("config.model.encoder, config.model.more_encoders.NAME", run.EncoderConfig),
        ("config.model.llm", run.LlmConfig),
        ("config.data", run.DataConfig),
        ("config.parallel", run.ParallelConfig),
        ("config.parallel.encoder, config.parallel.more_encoders.NAME", run.EncoderParallel),
        ("config.train", run.TrainConfig),
        ("config.emulate", run.EmulateConfig),
    ),
    "A cluster's job, for `plan`": (
        ("config", cluster.Cluster),
        ("config.llm", cluster.LlmSpec),
        ("config.encoders.NAME", cluster.EncoderSpec),
        ("config.parallel", cluster.LlmPlan),
        ("config.assume", cluster.Assumptions),
    ),
}
HEAD = """\
# Configuration

A configuration is a Python file with `get_config() -> ConfigDict`
([ml-collections](https://github.com/google/ml_collections)); those of `configs/` are examples.
Any value can be changed on the command line, as in `--config.parallel.pp=4`. It is checked whole
before anything compiles, and everything that is wrong is said at once. This page is made from the
dataclasses by `python -m optimus_jax.config_reference`; values without a default must be given."""


def page() -> str:
    """The whole page, in Markdown."""
    lines = [HEAD]
    for title, groups in PARTS.items():
        lines += ["", f"## {title}"]
        for path, kind in groups:
            lines += ["", f"### `{path}`", "", _words(kind), "", *_table(kind)]
    return "\n".join(lines) + "\n"


def _words(kind: type) -> str:
    return " ".join(inspect.cleandoc(kind.__doc__ or "").split())


def _table(kind: type) -> Iterator[str]:
    yield "| value | type | default |"
    yield "|---|---|---|"
    for field in dataclasses.fields(kind):
        yield f"| `{field.name}` | {str(field.type).replace('|', 'or')} | {_default(field)} |"


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        nested = dataclasses.is_dataclass(field.default)
        return "its own defaults" if nested else f"`{field.default!r}`"
    if field.default_factory is not dataclasses.MISSING:
        made = field.default_factory()
        return "its own defaults" if dataclasses.is_dataclass(made) else f"`{made!r}`"
    return ""


if __name__ == "__main__":
    sys.stdout.write(page())
