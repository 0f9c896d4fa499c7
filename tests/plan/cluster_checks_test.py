"""Errors in a cluster's configuration, all at once and in words."""

from __future__ import annotations

from typing import Any

import pytest

from configs import clusters, paper
from optimus_jax.config_checks import ConfigError
from optimus_jax.plan.cluster_checks import from_config_dict, is_cluster


def values(**changes: Any) -> dict[str, Any]:
    found = paper.get_config("strong_3072").to_dict()
    for path, value in changes.items():
        *groups, key = path.split("__")
        group = found
        for name in groups:
            group = group[name]
        group[key] = value
    return found


@pytest.mark.parametrize("row", [*paper.ROWS, "bubbles"])
def test_rows_of_the_paper_are_right(row: str) -> None:
    assert from_config_dict(paper.get_config(row).to_dict()).gpus > 0


@pytest.mark.parametrize("name", list(clusters.SIZES))
def test_examples_are_right(name: str) -> None:
    assert is_cluster(clusters.get_config(name).to_dict())
    from_config_dict(clusters.get_config(name).to_dict())


def test_all_errors_come_at_once() -> None:
    wrong = values(
        hardware="h10",
        gpus=3000,
        batch=1000,
        llm__name="GPT-175",
        llm__recompute="half",
        assume__slot_contention=0.5,
        parallel__chunks=-1,
    )
    wrong["encoders"]["ViT-22B"] |= {"tokens": 100, "stages": 3}
    with pytest.raises(ConfigError) as error:
        from_config_dict(wrong)
    assert [line.partition(":")[0] for line in error.value.errors] == [
        "config.hardware",
        "config.llm.recompute",
        "config.parallel.chunks",
        "config.assume.slot_contention",
        "config.llm.name",
        "config.parallel",
        "config.batch",
        "config.encoders.ViT-22B",
        "config.encoders.ViT-22B.stages",
    ]
    text = str(error.value)
    assert "did you mean h100" in text
    assert "did you mean GPT-175B" in text
    assert "dp 48 x pp 8 x tp 8 = 3072 devices, config.gpus is 3000" in text
    assert "1000 is no multiple of dp 48 x microbatch 2 = 96" in text
    assert "3 does not divide parallel.pp, 8" in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpus": "many"}, "config.gpus: expected a whole number, got 'many'"),
        ({"encoders": 3}, "config.encoders: expected named groups of settings, got 3"),
        ({"llm__frozen": 1}, "config.llm.frozen: expected True or False, got 1"),
        ({"assume__vit_collective_s": 1e-3}, "leaves nothing beside 4 collectives"),
        ({"assume__vit_backward_s": 0.0}, "are given together"),
        ({"llm__layers": 3}, "needs layers, width, heads and hidden"),
    ],
)
def test_single_errors(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_config_dict(values(**changes))
    assert words in str(error.value)
