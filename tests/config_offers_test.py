"""What a refusal offers instead is taken."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.digits import get_config
from optimus_jax.config import Config, from_config_dict, split_layers
from optimus_jax.config_checks import did_you_mean
from optimus_jax.schedule.task import EncoderPipeline, Pipeline
from tests.config_test import Values, changed, errors_of

numbers = st.integers(1, 9)


@settings(max_examples=60, deadline=None)
@given(batch=st.integers(1, 200), dp=numbers, pp=numbers, microbatches=numbers)
def test_the_batches_that_are_offered_are_taken(
    batch: int, dp: int, pp: int, microbatches: int
) -> None:
    changes = {
        "parallel.dp": dp,
        "parallel.pp": pp,
        "parallel.microbatches": microbatches,
        "model.llm.layers": 9,
        "train.batch": batch,
    }
    found = errors_of(get_config().to_dict(), changes)
    assert len(found) == (batch % (dp * pp * microbatches) > 0)
    for error in found:
        offered = [int(n) for n in re.findall(r"\d+", error.rpartition("; ")[2])]
        assert offered
        for value in offered:
            assert not errors_of(get_config().to_dict(), {**changes, "train.batch": value})
        distance = min(abs(value - batch) for value in offered)
        assert 2 * distance <= dp * pp * microbatches or offered[0] > batch


@settings(max_examples=60, deadline=None)
@given(width=st.integers(1, 200), heads=st.integers(1, 220))
def test_the_heads_that_are_offered_are_the_nearest_divisors(width: int, heads: int) -> None:
    changes = {"model.llm.width": width, "model.llm.heads": heads}
    found = errors_of(get_config().to_dict(), changes)
    assert len(found) == (width % heads > 0)
    for error in found:
        offered = [int(n) for n in re.findall(r"\d+", error.rpartition("; ")[2])]
        between = range(min(offered), max(*offered, heads) + 1)
        assert offered == [n for n in between if width % n == 0]


def test_the_given_configuration_and_the_plans_it_names_are_taken(values: Values) -> None:
    config = from_config_dict(values)
    assert isinstance(config, Config)
    assert (config.microbatch_rows, config.model.image_tokens, config.model.sequence) == (8, 40, 49)
    assert config.pipeline == Pipeline(2, 4, 1, (1, 1), (EncoderPipeline((2,)),))
    for change in ({"parallel.pp": 1}, {"parallel.dp": 2}):
        assert errors_of(get_config().to_dict(), change) == []


def test_rows_and_layers_of_a_larger_plan(values: Values) -> None:
    changes = {
        "parallel.dp": 2,
        "parallel.pp": 3,
        "parallel.chunks": 2,
        "parallel.microbatches": 6,
        "train.batch": 72,
        "model.llm.layers": 8,
        "model.encoder.layers": 5,
    }
    config = from_config_dict(changed(values, changes))
    assert config.microbatch_rows == 6
    assert config.pipeline == Pipeline(3, 6, 2, (2, 2, 1, 1, 1, 1), (EncoderPipeline((5,)),))


@pytest.mark.parametrize(
    ("layers", "stages", "wanted"),
    [(4, 4, (1, 1, 1, 1)), (7, 3, (3, 2, 2)), (5, 4, (2, 1, 1, 1)), (3, 1, (3,))],
)
def test_layers_left_over_go_to_the_first_stages(
    layers: int, stages: int, wanted: tuple[int, ...]
) -> None:
    assert split_layers(layers, stages) == wanted


def test_a_hint_names_the_nearest_words_or_only_the_valid_ones() -> None:
    assert did_you_mean("phasd", ["phased", "filled"]) == (
        ", did you mean phased? (valid: phased, filled)"
    )
    assert did_you_mean("zzz", ["phased", "filled"]) == " (valid: phased, filled)"
