"""Parallel plans are taken if the devices can share the model so, or refused in words."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from configs.digits import get_config
from optimus_jax.config import filled_in, from_config_dict
from optimus_jax.config_checks import BLOCKS, POLICIES
from optimus_jax.models import blocks, region
from optimus_jax.parallel.mesh import Grid
from tests.config_test import errors_of


@pytest.fixture
def values() -> dict[str, Any]:
    """pp 4, tp 2, an encoder of two stages and another that hears; 64 + 6 + 10 positions."""
    values = get_config().to_dict()
    values["model"] |= {
        "image_height": 32,
        "image_width": 32,
        "text_length": 10,
        "vocabulary": 84,
        "projector_hidden": 24,
        "audio_frames": 24,
        "audio_bands": 5,
        "encoder": {"layers": 4, "width": 48, "heads": 4, "hidden": 192, "patch": 4},
        "more_encoders": {
            "sound": {"layers": 2, "width": 24, "heads": 2, "hidden": 32, "patch": 4}
            | {"input": "audio"}
        },
        "llm": {"layers": 4, "width": 64, "heads": 4, "hidden": 256},
    }
    values["parallel"] |= {
        "pp": 4,
        "tp": 2,
        "encoder": {"pp": 2, "tp": 2},
        "more_encoders": {"sound": {"pp": 2}},
    }
    return values


def test_the_plan_is_taken(values: dict[str, Any]) -> None:
    config = from_config_dict(values)
    assert config.parallel.devices == 8
    assert [(e.layers, e.units) for e in config.pipeline.encoders] == [((2, 2), 2), ((1, 1), 2)]
    assert Grid.of(config).shape == {"dp": 1, "po": 2, "pi": 2, "to": 1, "t1": 2, "ti": 1}
    assert config.model.sequence == 64 + 6 + 10


SOUND = {"layers": 2, "width": 24, "heads": 2, "hidden": 32, "patch": 4, "input": "audio"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"parallel.encoder.pp": 3},
        "parallel.encoder.pp: 3 stages do not divide the LLM's 4; 2 or 4 would",
    ),
    (
        {"parallel.more_encoders.sound.tp": 4, "model.more_encoders.sound.heads": 4}
        | {"parallel.more_encoders.sound.sequence_parallel": False},
        "parallel.more_encoders.sound.tp: 4 tensor shards do not divide the LLM's 2; 2 would",
    ),
    (
        {"parallel.pp": 6, "model.llm.layers": 6, "train.batch": 48}
        | {"parallel.more_encoders.sound.pp": 3, "model.more_encoders.sound.layers": 3},
        "parallel.more_encoders.sound.pp: of 3 and parallel.encoder's 2 one must divide the other;"
        " 2 or 6 would do",
    ),
    (
        {"parallel.encoder.pp": 4, "model.encoder.layers": 3},
        "parallel.encoder.pp: 4 stages, but model.encoder has 3 layers; each needs at least one",
    ),
    (
        {"model.llm.heads": 1, "model.llm.hidden": 35, "parallel.sequence_parallel": False},
        "parallel.tp: the LLM's heads 1 and hidden 35 do not divide among 2 tensor shards; 1 would"
        " do",
    ),
    (
        {"model.llm.block": "llama", "model.llm.kv_heads": 1},
        "parallel.tp: the LLM's kv_heads 1 do not divide among 2 tensor shards; 1 would do",
    ),
    (
        {"model.encoder.heads": 3},
        "parallel.encoder.tp: model.encoder's heads 3 do not divide among 2 tensor shards; 1 would"
        " do",
    ),
    (
        {"model.projector_hidden": 15},
        "parallel.encoder.tp: model.encoder's projector_hidden 15 do not divide among 2 tensor"
        " shards; 1 would do",
    ),
    ({"model.vocabulary": 83}, "model.vocabulary: 83 does not divide among tp 2; 84 would"),
    ({"model.vocabulary": 87}, "model.vocabulary: 87 does not divide among tp 2; 86 or 88 would"),
    (
        {"model.text_length": 9},
        "model.text_length: 70 image tokens and 9 of text do not divide among tp 2; 10 of text"
        " would, or config.parallel.sequence_parallel=False",
    ),
    (
        {"model.text_length": 13},
        "model.text_length: 70 image tokens and 13 of text do not divide among tp 2; 12 or 14 of"
        " text would, or config.parallel.sequence_parallel=False",
    ),
    (
        {"parallel.more_encoders.sound.tp": 2, "model.audio_frames": 28, "model.text_length": 11},
        "parallel.more_encoders.sound.tp: 7 positions of model.more_encoders.sound do not divide"
        " among 2 tensor shards; 1 would, or"
        " config.parallel.more_encoders.sound.sequence_parallel=False",
    ),
    (
        {"train.batch": 24},
        "train.batch: 24 rows do not divide into dp 1 x microbatches 4 x encoder units 4 (the"
        " encoders have 2 and 4 replicas beside a pipeline) = 16 parts; 16 or 32 would",
    ),
    (
        {"parallel.more_encoders.touch.pp": 2},
        "parallel.more_encoders.touch: model.more_encoders has no such encoder (valid: sound)",
    ),
    (
        {"parallel.encoder_cap": -1},
        "parallel.encoder_cap: must not be negative, got -1",
    ),
    (
        {"parallel.encoder_cap": 2, "parallel.method": "phased"},
        "parallel.encoder_cap: phased keeps encoder activations of all 4 microbatches, not of 2; 4"
        " would do, or the method filled",
    ),
    (
        {"parallel.method": "balanced"},
        "parallel.method: balanced runs one encoder, the model has 2; filled runs any number",
    ),
    (
        {"parallel.tp": 1, "parallel.fuse": True, "parallel.encoder.tp": 1},
        "parallel.fuse: tp 1 has no tensor-parallel collectives to hide encoder work behind; tp 2"
        " or more has, or fuse=False",
    ),
    (
        {"parallel.fuse": True, "parallel.method": "phased"},
        "parallel.fuse: phased makes no fused tasks; filled_whole and filled do, or fuse=False",
    ),
    (
        {"model.more_encoders": {"layers": SOUND}, "parallel.more_encoders": {}},
        "model.more_encoders.layers: the name is taken; any other would do",
    ),
    (
        {"model.more_encoders": {"a b": SOUND}, "parallel.more_encoders": {}},
        "model.more_encoders: 'a b' must be a name of letters, digits and _",
    ),
    ({"model.llm.kv_heads": -2}, "model.llm.kv_heads: must not be negative, got -2"),
    (
        {"model.llm.kv_heads": 2},
        "model.llm.kv_heads: gpt has keys and values for each of its 4 heads, not 2; llama can"
        " share them",
    ),
    (
        {"model.llm.block": "llama", "model.llm.heads": 8, "model.llm.kv_heads": 6},
        "model.llm.kv_heads: 8 heads do not share 6 evenly; 4 or 8 would do",
    ),
    (
        {"model.llm.block": "llama", "model.llm.heads": 64},
        "model.llm: width 64 over 64 heads is 1, but rotary positions (llama) turn pairs of"
        " numbers: 32 heads would do",
    ),
    (
        {"model.encoder.block": "llama", "model.encoder.width": 36},
        "model.encoder: width 36 over 4 heads is 9, but rotary positions (llama) turn pairs of"
        " numbers: 3 or 6 heads would do",
    ),
    (
        {"model.more_encoders.sound.block": "llama", "model.more_encoders.sound.width": 21}
        | {"model.more_encoders.sound.heads": 3},
        "model.more_encoders.sound: width 21 over 3 heads is 7, but rotary positions (llama) turn"
        " pairs of numbers: an even width would do",
    ),
    (
        {"model.audio_frames": 26},
        "model.audio_frames: 26 frames do not divide into patches of 4, the patch of"
        " model.more_encoders.sound; 24 or 28 would",
    ),
    (
        {"model.audio_bands": 0},
        "model.audio_bands: model.more_encoders.sound takes audio, so it must be positive: 0",
    ),
]


@pytest.mark.parametrize(("changes", "wanted"), REFUSED, ids=lambda x: str(x)[:60])
def test_a_bad_plan_is_refused_once_with_its_numbers(
    values: dict[str, Any], changes: dict[str, Any], wanted: str
) -> None:
    assert errors_of(values, changes) == [f"config.{wanted}"]


TAKEN: list[dict[str, Any]] = [
    {"model.text_length": 9, "parallel.sequence_parallel": False},
    {"parallel.encoder_cap": 2},
    {"parallel.encoder_cap": 4, "parallel.method": "phased"},
    {"parallel.fuse": True},
    {"model.llm.block": "llama", "model.llm.kv_heads": 2},
    {"model.llm.kv_heads": 4},
    {"parallel.more_encoders": {}},  # each device then has the whole encoder
    {"parallel.more_encoders.sound.tp": 2, "model.audio_frames": 28, "model.text_length": 11}
    | {"parallel.more_encoders.sound.sequence_parallel": False},
]


@pytest.mark.parametrize("changes", TAKEN, ids=str)
def test_plans_near_by_are_taken(values: dict[str, Any], changes: dict[str, Any]) -> None:
    assert errors_of(values, changes) == []


def test_sound_without_an_encoder_for_it_means_nothing(values: dict[str, Any]) -> None:
    values["model"]["more_encoders"], values["parallel"]["more_encoders"] = {}, {}
    assert errors_of(values, {}) == [
        f"config.model.{name}: means nothing where no encoder's input is audio"
        for name in ("audio_frames", "audio_bands")
    ]


@pytest.mark.parametrize("name", ["vision", "llm"])
def test_names_of_other_modules_are_taken(values: dict[str, Any], name: str) -> None:
    model, parallel = values["model"], values["parallel"]
    model["more_encoders"] = {name: model["more_encoders"]["sound"]}
    parallel["more_encoders"] = {}
    (error,) = errors_of(values, {})
    assert error == f"config.model.more_encoders.{name}: the name is taken; any other would do"


def test_all_errors_of_a_plan_come_at_once(values: dict[str, Any]) -> None:
    del values["train"]["warmup"]
    changes = {
        "parallel.encoder.pp": 3,
        "parallel.encoder.stages": 3,
        "model.more_encoders.sound.heads": 5,
        "model.more_encoders.sound.widht": 5,
        "parallel.recompute": "some",
        "model.llm.hidden": 33,
        "model.vocabulary": 83,
        "model.text_length": 9,
        "parallel.encoder_cap": -1,
    }
    found = errors_of(values, changes)
    starts = [
        "config.train.warmup: missing",
        "config.parallel.encoder.stages: unknown (valid: pp, tp, sequence_parallel, recompute)",
        "config.model.more_encoders.sound.widht: unknown, did you mean width?",
        "config.model.more_encoders.sound: width 24 does not divide into 5 heads",
        "config.parallel.recompute: unknown 'some'",
        "config.parallel.encoder.pp: 3 stages do not divide",
        "config.parallel.tp: the LLM's hidden 33",
        "config.model.vocabulary: 83",
        "config.model.text_length: 70 image tokens and 9 of text",
        "config.parallel.encoder_cap: must not be negative",
    ]
    assert [sum(error.startswith(start) for error in found) for start in starts] == [1] * 10
    assert len(found) == 10


def test_the_words_are_those_of_the_models() -> None:
    assert tuple(blocks.BLOCKS) == BLOCKS
    assert tuple(region.POLICIES) == POLICIES


def test_every_further_encoder_has_a_plan_in_the_models_order(values: dict[str, Any]) -> None:
    sound = values["model"]["more_encoders"]["sound"]
    values["model"]["more_encoders"] = {"a": sound, "c": sound, "b": sound}
    values["parallel"]["more_encoders"] = {"b": {"pp": 2}, "a": {"tp": 2}}
    values["model"]["text_length"] = 12  # 64 + 3 x 6 + 12
    config = from_config_dict(values)
    names = ["vision", "a", "c", "b"]
    assert list(config.model.encoders) == list(config.encoder_plans) == names
    assert [(e.name, e.pp, e.tp) for e in Grid.of(config).encoders] == [
        ("vision", 2, 2),
        ("a", 1, 2),
        ("c", 1, 1),
        ("b", 2, 1),
    ]
    assert [e.stages for e in config.pipeline.encoders] == [2, 1, 1, 2]


def test_defaults_are_filled_in_by_name(values: dict[str, Any]) -> None:
    values["parallel"]["more_encoders"] = {}
    given = copy.deepcopy(values)
    filled = filled_in(values)
    assert values == given
    assert from_config_dict(filled) == from_config_dict(values)
    assert filled["parallel"]["more_encoders"]["sound"]["pp"] == 1
    assert filled["model"]["more_encoders"]["sound"]["block"] == "vit"
    assert filled["parallel"]["zero"] is True
    del values["model"]["llm"]["width"]
    assert "width" not in filled_in(values)["model"]["llm"]
