"""What a configuration must say about its data set, and what is wrong with it when it does not."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from optimus_jax.config import from_config_dict
from tests.config_test import Values, errors_of

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
