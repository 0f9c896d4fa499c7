"""What a configuration must say about its data set, and what is wrong with it when it does not."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from optimus_jax.config import from_config_dict
from optimus_jax.data.caption_files import FORMS
from tests.config_test import Values, changed, errors_of

MIRROR = "data.mirror: means nothing for the data set {!r}"
OTHER_DATA: list[tuple[str, dict[str, Any], list[str]]] = [
    ("fashion", {}, []),
    (
        "fashion",
        {"model.image_height": 24, "model.text_length": 25, "data.digits_low": 1},
        [
            "data.digits_low: means nothing for the data set 'fashion'",
            "model: a picture of 24 x 40 pixels has no room for pictures of garments; the smallest"
            " is 28 x 28",
            "model.text_length: 25 is too short for pictures of garments, which take 26",
        ],
    ),
    ("fashion", {"data.folder": 3}, ["data.folder: expected a word, got 3"]),
    ("fashion", {"data.hide_text": 1}, []),
    ("fashion", {"data.hide_text": -0.1}, ["data.hide_text: a share from 0 to 1, got -0.1"]),
    ("fashion", {"data.hide_text": 1.5}, ["data.hide_text: a share from 0 to 1, got 1.5"]),
    ("stamps", {"model.image_channels": 3}, []),
    ("stamps", {"model.image_channels": 3, "data.folder": "nowhere"}, []),  # found out later
    ("stamps", {"model.image_channels": 3, "data.mirror": True}, [MIRROR.format("stamps")]),
    ("fashion", {"data.mirror": True}, [MIRROR.format("fashion")]),
    ("folder", {"model.image_channels": 3, "data.folder": "nowhere", "data.mirror": True}, []),
    (
        "folder",
        {"model.text_length": 2, "data.digits_low": 1},
        [
            "data.folder: the data set 'folder' is a folder of your own, which"
            f" --config.data.folder=PATH must name; {FORMS}",
            "data.digits_low: means nothing for the data set 'folder'",
            "model.text_length: 2 is too short for pictures and their captions, which take 3",
            "model.image_channels: the data set has 3, not 1",
        ],
    ),
    (
        "stamps",
        {"model.text_length": 41},
        [
            "model.text_length: 41 is too short for stamps and their captions, which take 42",
            "model.image_channels: the data set has 3, not 1",
        ],
    ),
]


@pytest.mark.parametrize(("name", "changes", "wanted"), OTHER_DATA)
def test_each_data_set_has_its_own_demands(
    values: Values, name: str, changes: dict[str, Any], wanted: list[str]
) -> None:
    values["data"] = {"name": name}
    sizes = {"model.image_height": 28, "model.text_length": 48}
    found = errors_of(values, {**sizes, **changes})
    assert found == [f"config.{error}" for error in wanted]


@pytest.mark.parametrize("module", ["digits", "fashion", "stamps"])
def test_the_given_configurations_are_taken(module: str) -> None:
    given = importlib.import_module(f"configs.{module}").get_config().to_dict()
    assert from_config_dict(given).data.name == module


def test_the_configuration_for_a_folder_of_your_own_asks_for_the_folder_alone() -> None:
    given = importlib.import_module("configs.own").get_config().to_dict()
    (error,) = errors_of(given, {})
    assert error.startswith("config.data.folder: ") and "--config.data.folder=PATH" in error
    assert from_config_dict(changed(given, {"data.folder": "mine"})).data.name == "folder"
