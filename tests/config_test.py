"""A configuration is built once, whole, or refused with everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from optimus_jax.config import from_config_dict
from optimus_jax.config_checks import ConfigError

Values = dict[str, Any]


def changed(values: Values, changes: Mapping[str, Any]) -> Values:
    for path, value in changes.items():
        *groups, name = path.split(".")
        node = values
        for group in groups:
            node = node.setdefault(group, {})
        node[name] = value
    return values


def errors_of(values: Values, changes: Mapping[str, Any]) -> list[str]:
    """Everything that is wrong with the changed values; nothing if they make a configuration."""
    try:
        from_config_dict(changed(values, changes))
    except ConfigError as error:
        assert str(error) == "\n".join(error.errors)
        return error.errors
    return []


POSITIVE = [
    *(f"model.{n}" for n in ("image_height", "image_width", "text_length", "projector_hidden")),
    *(f"model.encoder.{n}" for n in ("layers", "width", "heads", "hidden", "patch")),
    *(f"model.llm.{n}" for n in ("layers", "width", "heads", "hidden")),
    *(f"data.{n}" for n in ("digits_low", "digits_high")),
    *(f"parallel.{n}" for n in ("dp", "pp", "tp", "chunks", "microbatches")),
    *(f"parallel.encoder.{n}" for n in ("pp", "tp")),
    *(f"train.{n}" for n in ("batch", "steps", "log_every", "save_every", "keep", "clip")),
]


@pytest.mark.parametrize("path", POSITIVE)
@pytest.mark.parametrize("value", [0, -3])
def test_sizes_must_be_positive(values: Values, path: str, value: int) -> None:
    got = f"{float(value)}" if path == "train.clip" else value
    found = errors_of(values, {path: value})
    assert f"config.{path}: must be positive, got {got}" in found
    assert not [error for error in found if "would" in error]  # nothing is near it


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"model.encoder.heads": 5},
        "model.encoder: width 64 does not divide into 5 heads; 4 or 8 heads would",
    ),
    ({"evaluate_examples": 1}, "evaluate_examples: must be at least 2, got 1"),
    ({"model.llm.heads": 65}, "model.llm: width 64 does not divide into 65 heads; 64 heads would"),
    (
        {"model.image_height": 18},
        "model.image_height: 18 pixels do not divide into patches of 4; 16 or 20 would",
    ),
    (
        {"model.image_width": 41},
        "model.image_width: 41 pixels do not divide into patches of 4; 40 or 44 would",
    ),
    ({"data.digits_low": 5}, "data: digits_low 5 is above digits_high 4"),
    (
        {"model.image_width": 28},
        "model: a picture of 16 x 28 pixels has no room for 4 digits; the smallest is 8 x 32",
    ),
    (
        {"model.image_height": 4},
        "model: a picture of 4 x 40 pixels has no room for 4 digits; the smallest is 8 x 32",
    ),
    ({"model.text_length": 8}, "model.text_length: 8 is too short for 4 digits, which take 9"),
    (
        {"data.folder": "elsewhere"},
        "data.folder: means nothing for the data set 'digits'",
    ),
    ({"model.image_channels": 3}, "model.image_channels: the data set has 1, not 3"),
    ({"model.image_token": 7}, "model.image_token: the data set has 3, not 7"),
    ({"model.vocabulary": 14}, "model.vocabulary: 14 is too small, captions take 83"),
    (
        {"train.batch": 33},
        "train.batch: 33 rows do not divide into dp 1 x microbatches 4 x encoder units 2 (one for"
        " each replica of an encoder beside the pipeline) = 8 parts; 32 or 40 would",
    ),
    (
        {"train.batch": 1, "parallel.microbatches": 4096},
        "train.batch: 1 rows do not divide into dp 1 x microbatches 4096 x encoder units 2 (one for"
        " each replica of an encoder beside the pipeline) = 8192 parts; 8192 would",
    ),
    (
        {"parallel.chunks": 2},
        "parallel: pp 2 x chunks 2 = 4 virtual stages, but the LLM has 2 layers; each needs at"
        " least one",
    ),
    (
        {"parallel.chunks": 2, "model.llm.layers": 4, "parallel.order": "gpipe"},
        "parallel.order: gpipe runs one chunk, not 2; 1f1b runs several",
    ),
    (
        {"parallel.chunks": 2, "model.llm.layers": 4, "parallel.microbatches": 1},
        "parallel.microbatches: interleaved 1F1B on 2 stages takes multiples of 2, not 1; 2 would"
        " do",
    ),
    (
        {"train.warmup": 1750},
        "train.warmup: 1750 steps must be at least 0 and fewer than the 1750 of the run",
    ),
    (
        {"train.warmup": -1},
        "train.warmup: -1 steps must be at least 0 and fewer than the 1750 of the run",
    ),
    ({"train.learning_rate": -1e-3}, "train.learning_rate: must not be negative, got -0.001"),
    ({"train.weight_decay": -1.0}, "train.weight_decay: must not be negative, got -1.0"),
    ({"train.seed": -1}, "train.seed: must not be negative, got -1"),
    ({"train.seed": 2**32}, "train.seed: must be at most 4294967295, got 4294967296"),
    ({"hardware": "h20"}, "hardware: unknown 'h20', did you mean h200 or h100?"),
    ({"model.dtype": "float16"}, "model.dtype: unknown 'float16', did you mean "),
    ({"data.name": "cats"}, "data.name: unknown 'cats' (valid: digits, fashion, folder, stamps)"),
    (
        {"parallel.order": "1f1v", "parallel.chunks": 2, "model.llm.layers": 4},
        "parallel.order: unknown '1f1v', did you mean 1f1b? (valid: 1f1b, gpipe)",
    ),
    ({"parallel.method": "filed"}, "parallel.method: unknown 'filed', did you mean filled"),
    (
        {"model.llm.block": "lama"},
        "model.llm.block: unknown 'lama', did you mean llama? (valid: vit, gpt, vit22b, llama)",
    ),
    ({"model.encoder.block": "vit22"}, "model.encoder.block: unknown 'vit22', did you mean "),
    ({"model.encoder.input": "sound"}, "model.encoder.input: unknown 'sound' (valid: image, "),
    (
        {"parallel.recompute": "select"},
        "parallel.recompute: unknown 'select', did you mean selective? (valid: full, selective,"
        " none)",
    ),
    ({"parallel.encoder.recompute": "no"}, "parallel.encoder.recompute: unknown 'no', did you "),
    ({"parallel.gradients": "float16"}, "parallel.gradients: unknown 'float16', did you mean "),
]


@pytest.mark.parametrize(("changes", "wanted"), REFUSED, ids=lambda x: str(x)[:60])
def test_a_bad_value_is_refused_once_with_its_numbers(
    values: Values, changes: dict[str, Any], wanted: str
) -> None:
    (error,) = errors_of(values, changes)
    assert error.startswith(f"config.{wanted}")


WRONG_TYPE: list[tuple[str, Any, str]] = [
    ("train.steps", "ten", "expected a whole number, got 'ten'"),
    ("train.steps", 10.0, "expected a whole number, got 10.0"),
    ("train.steps", True, "expected a whole number, got True"),
    ("train.steps", None, "expected a whole number, got None"),
    ("train.clip", "1", "expected a number, got '1'"),
    ("train.clip", False, "expected a number, got False"),
    ("train.clip", float("nan"), "expected a finite number, got nan"),
    ("train.learning_rate", float("inf"), "expected a finite number, got inf"),
    ("hardware", 3, "expected a word, got 3"),
    ("model.llm", 3, "expected a group of settings, got 3"),
]


@pytest.mark.parametrize(("path", "value", "wanted"), WRONG_TYPE)
def test_a_wrong_type_is_refused_once(values: Values, path: str, value: Any, wanted: str) -> None:
    assert errors_of(values, {path: value}) == [f"config.{path}: {wanted}"]


def test_a_whole_number_will_do_for_a_number(values: Values) -> None:
    config = from_config_dict(changed(values, {"train.clip": 2}))
    assert config.train.clip == 2.0
    assert type(config.train.clip) is float


def test_missing_and_unknown_keys_are_named(values: Values) -> None:
    del values["train"]["seed"], values["model"]["encoder"]
    values["parallel"]["stages"] = 2
    values["model"]["llm"]["widht"] = 3
    assert errors_of(values, {}) == [
        "config.model.encoder: missing",
        "config.model.llm.widht: unknown, did you mean width?"
        " (valid: layers, width, heads, hidden, block, kv_heads)",
        "config.parallel.stages: unknown (valid: dp, pp, chunks, microbatches, order, method, tp,"
        " encoder, more_encoders, sequence_parallel, zero, recompute, gradients, encoder_cap,"
        " fuse)",
        "config.train.seed: missing",
    ]


def test_all_errors_come_at_once(values: Values) -> None:
    del values["train"]["warmup"]
    changes = {
        "hardware": 3,
        "parallel.method": "filed",
        "parallel.pp": 3,
        "train.batch": 33,
        "train.steps": "ten",
        "train.learning_rate": -1.0,
        "model.encoder.heads": 0,
        "model.llm.heads": 5,
        "model.encoder.patch": 0,
        "data.digits_low": 9,
        "model.text_length": 2,
        "model.encoder.widht": 1,
    }
    found = errors_of(values, changes)
    starts = [
        "config.hardware: expected",
        "config.parallel.method: unknown",
        "config.parallel: pp 3 ",
        "config.train.batch: 33 rows",
        "config.train.steps: expected",
        "config.train.warmup: missing",
        "config.train.learning_rate: must not be negative",
        "config.model.encoder.heads: must be positive",
        "config.model.llm: width 64 does not divide into 5 heads",
        "config.model.encoder.patch: must be positive",
        "config.data: digits_low 9",
        "config.model.text_length: 2",
        "config.model.encoder.widht: unknown",
    ]
    assert [sum(error.startswith(start) for error in found) for start in starts] == [1] * 13
    assert len(found) == 13
