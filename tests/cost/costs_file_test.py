"""Costs as a file: what comes back, what is refused."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest

from optimus_jax.config import from_config_dict
from optimus_jax.cost.analytic import analytic
from optimus_jax.cost.costs import Costs, Pass
from tests.cost.costs_test import COSTS


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "3", "[]", "null", '"costs"', "{}", '{"costs": 3}', '{"costs": {}}'),
        '{"source": "half"}',
        '{"costs": {"source": "measured", "speed": 1.0}}',
    ],
)
def test_what_holds_no_costs_is_refused(tmp_path: pathlib.Path, text: str) -> None:
    (tmp_path / "costs.json").write_text(text)
    with pytest.raises(ValueError):
        Costs.load(tmp_path / "costs.json")


@pytest.mark.parametrize(
    ("part", "value"),
    [
        *(("head", "fast"), ("head", None), ("exchange", [1.0]), ("epilogue", {"forward": 1.0})),
        *(("llm_layer", 3.0), ("llm_layer", {"forward": 1.0}), ("llm_layer", None)),
        *(("overlap", 1.0), ("source", 3), ("encoders", {}), ("encoders", {"vision": 3})),
        ("encoders", {"vision": {"layer": {"forward": 1.0, "backward": 1.0}}}),
        ("llm_layer", {"forward": "a", "backward": 1.0}),
        *(("head", float("nan")), ("exchange", -1.0)),
    ],
    ids=str,
)
def test_costs_that_are_not_seconds_are_refused(
    tmp_path: pathlib.Path, part: str, value: Any
) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({**dataclasses.asdict(COSTS), part: value}))
    with pytest.raises(ValueError):
        Costs.load(path)


def test_a_missing_file_is_another_error(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError):
        Costs.load(tmp_path / "costs.json")


def test_costs_survive_json(tmp_path: pathlib.Path, values: dict[str, Any]) -> None:
    vision = dataclasses.replace(COSTS.encoders["vision"], feature_exchange=0.5)
    more = dataclasses.replace(
        COSTS,
        llm_task=Pass(2.0, 4.0),
        encoders={"vision": vision, "ears": COSTS.encoders["vision"]},
        overlap=True,
        window=Pass(0.1, 0.2),
    )
    for costs in (COSTS, more, analytic(from_config_dict(values))):
        costs.save(tmp_path / "costs.json")
        assert Costs.load(tmp_path / "costs.json") == costs
