"""Costs: operation counts against the model's own, and where each part's seconds go."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from optimus_jax.config import Config, from_config_dict
from optimus_jax.cost.costs import Costs, EncoderCosts, Pass, emulated
from optimus_jax.errors import UserError
from optimus_jax.schedule.program import Payload
from optimus_jax.schedule.task import EncoderPipeline, Pipeline

COSTS = Costs(
    source="by hand",
    llm_layer=Pass(1.0, 3.0),
    llm_embedding=Pass(0.125, 0.25),
    head=0.5,
    encoders={"vision": EncoderCosts(Pass(10.0, 30.0), Pass(100.0, 200.0), Pass(1000.0, 3000.0))},
    exchange=0.1,
    epilogue=7.0,
)


LLM, VISION = Payload("llm"), Payload("feature")
EARS = {"layers": 1, "width": 32, "heads": 2, "hidden": 40, "patch": 4, "input": "audio"}


def changed(values: dict[str, Any], **groups: Any) -> Config:
    """A Config with other settings in the named groups."""

    def merged(old: Any, new: Any) -> Any:
        if not isinstance(new, dict):
            return new
        return {**old, **{key: merged(old.get(key, {}), value) for key, value in new.items()}}

    return from_config_dict(merged(values, groups))


def test_durations_have_the_pipelines_shape_and_ends(values: dict[str, Any]) -> None:
    config = changed(
        values,
        parallel={"pp": 2, "chunks": 2},
        model={"encoder": {"layers": 3}, "llm": {"layers": 5}},
    )
    found = COSTS.durations(config)
    assert found.forward == (2.125, 1.0, 1.0, 1.5)  # 2, 1, 1, 1 layers, embedding, head
    assert found.backward == (6.25, 3.0, 3.0, 3.0)
    (encoder,) = found.encoders
    assert encoder.forward == (110.0, 10.0, 1010.0)
    assert encoder.backward == (230.0, 30.0, 3030.0)
    assert (found.transfer, found.epilogue) == (0.1, 7.0)


def test_one_stage_and_one_encoder_layer_hold_both_ends(values: dict[str, Any]) -> None:
    config = changed(values, parallel={"pp": 1}, model={"encoder": {"layers": 1}})
    found = COSTS.durations(config)
    assert (found.forward, found.backward) == ((2.625,), (6.25,))
    (encoder,) = found.encoders
    assert (encoder.forward, encoder.backward) == ((1110.0,), (3230.0,))
    assert found.transfer == 0.0  # there is nobody to exchange with


def test_a_task_takes_time_beside_its_layers(values: dict[str, Any]) -> None:
    config = changed(values, parallel={"pp": 2, "chunks": 2}, model={"llm": {"layers": 5}})
    found = dataclasses.replace(COSTS, llm_task=Pass(20.0, 40.0)).durations(config)
    assert found.forward == (22.125, 21.0, 21.0, 21.5)
    assert found.backward == (46.25, 43.0, 43.0, 43.0)


@pytest.mark.parametrize(
    ("pp", "feature_exchange", "wanted"),
    [(2, 0.25, (0.1, 0.25)), (2, 0.0, (0.1, 0.0)), (2, None, (0.1, 0.1)), (1, 0.25, (0.0, 0.0))],
)
def test_features_may_travel_faster_or_slower(
    values: dict[str, Any],
    pp: int,
    feature_exchange: float | None,
    wanted: tuple[float, float],
) -> None:
    config = changed(values, parallel={"pp": pp})
    vision = dataclasses.replace(COSTS.encoders["vision"], feature_exchange=feature_exchange)
    found = dataclasses.replace(COSTS, encoders={"vision": vision}).durations(config)
    assert (found.travel(LLM), found.travel(VISION)) == wanted


def test_hidden_states_travel_where_an_encoder_has_stages(values: dict[str, Any]) -> None:
    config = changed(values, parallel={"pp": 2, "encoder": {"pp": 2}})
    vision = dataclasses.replace(COSTS.encoders["vision"], hidden_exchange=0.3)
    found = dataclasses.replace(COSTS, encoders={"vision": vision}).durations(config)
    assert found.travel(Payload("hidden")) == 0.3
    assert COSTS.durations(config).travel(Payload("hidden")) == 0.1


def test_another_pipeline_of_the_same_model_has_its_own_stages_and_units(
    values: dict[str, Any],
) -> None:
    """The LLM begins in stage 1, and one unit is a whole microbatch, not half of one."""
    config = changed(
        values,
        parallel={"pp": 2, "chunks": 2},
        model={"encoder": {"layers": 3}, "llm": {"layers": 5}},
    )
    assert config.pipeline.encoders[0].units == 2
    pipe = Pipeline(2, config.parallel.microbatches, 2, (0, 1, 2, 2), (EncoderPipeline((3, 0)),))
    found = COSTS.durations(config, pipe)
    assert found.forward == (0.0, 1.125, 2.0, 2.5)
    assert found.backward == (0.0, 3.25, 6.0, 6.0)
    assert found.encoders[0].forward == (220.0, 20.0, 2020.0)
    assert found.encoders[0].backward == (460.0, 60.0, 6060.0)


def test_costs_of_another_model_are_refused(values: dict[str, Any]) -> None:
    audio = {"audio_frames": 12, "audio_bands": 5, "more_encoders": {"ears": EARS}}
    with pytest.raises(UserError, match="costs of vision say nothing of ears"):
        COSTS.durations(changed(values, model=audio))


@pytest.mark.parametrize(("fuse", "wanted"), [(False, (0.0, 0.0)), (True, (0.5, 0.75))])
def test_only_an_executor_with_fused_tasks_has_windows(
    values: dict[str, Any], fuse: bool, wanted: tuple[float, float]
) -> None:
    config = changed(
        values,
        parallel={"pp": 1, "tp": 2, "fuse": fuse},
        model={"vocabulary": 84, "text_length": 48},
    )
    around = {"gather": 2.0, "scatter": 3.0, "overlap": True, "window": Pass(0.5, 0.75)}
    found = dataclasses.replace(COSTS, **around).durations(config)
    assert found.window == wanted
    assert (found.gather, found.scatter, found.overlap) == (2.0, 3.0, True)


@pytest.mark.parametrize("sizes", [(1, 1, 2, 1), (2, 1, 6, 1), (2, 2, 4, 2), (4, 3, 12, 2)])
def test_emulated_tasks_take_what_the_configuration_says(
    values: dict[str, Any], sizes: tuple[int, int, int, int]
) -> None:
    pp, chunks, layers, stages = sizes
    values["emulate"] = {
        **{"chunk_forward_s": 0.5, "backward": 3.0},
        **{"encoder": 0.25, "encoder_backward": 0.75},
    }
    groups = {
        "parallel": {"pp": pp, "chunks": chunks, "encoder": {"pp": stages}},
        "model": {"encoder": {"layers": 3}, "llm": {"layers": layers}},
        "train": {"batch": 48},
    }
    config = changed(values, **groups)
    found = emulated(config).durations(config)
    assert found.forward == pytest.approx((0.5,) * (pp * chunks))
    assert found.backward == pytest.approx((1.5,) * (pp * chunks))
    stage, (encoder,) = 0.5 * chunks, found.encoders
    for layers_s, ratio in ((encoder.forward, 0.25), (encoder.backward, 0.75)):
        assert len(layers_s) == 3 and len(set(layers_s)) == 1
        units = pp // stages  # to a microbatch, each through all stages
        assert sum(layers_s) * units == pytest.approx(ratio * stage)
    assert (found.travel(LLM), found.travel(VISION), found.epilogue) == (0, 0, 0)
    assert emulated(config).source == "emulated"


def test_emulated_chunks_take_time_in_proportion_to_their_layers(values: dict[str, Any]) -> None:
    values["emulate"] = {"chunk_forward_s": 0.5, "backward": 2.0}
    config = changed(values, parallel={"pp": 2}, model={"llm": {"layers": 5}})
    found = emulated(config).durations(config)
    assert found.forward == pytest.approx((0.6, 0.4)), "3 and 2 layers; 2.5 would take 0.5"
    assert found.backward == pytest.approx((1.2, 0.8))
