"""Bounds and formulas of a contest by hand, and the model that an emulation runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from configs.bench import PRESETS, get_config
from optimus_jax import parallel_checks
from optimus_jax.config import Config, EncoderParallel, from_config_dict
from optimus_jax.cost.costs import Costs, Pass, emulated
from optimus_jax.measure.contest import bound_s, hollow, phased_s, text_only_s, work
from optimus_jax.plan.plan import make_plan


def config_of(pp: int = 2, microbatches: int = 4, **emulate: float) -> Config:
    values = get_config("pp2_m4").to_dict()
    values["parallel"] |= {"pp": pp, "microbatches": microbatches}
    values["train"]["batch"] = 12 * microbatches
    values["model"]["llm"]["layers"] = 2 * pp
    values["emulate"] = emulate
    return from_config_dict(values)


def seconds(config: Config, **parts: Any) -> Costs:
    """F = 1, B = 2 of each stage."""
    return dataclasses.replace(emulated(config), **parts)


def test_work_is_that_of_a_mean_stage_and_of_a_whole_microbatch() -> None:
    config = config_of(chunk_forward_s=1.0, encoder=0.5, encoder_backward=1.5)
    durations = seconds(config, head=0.5, llm_embedding=Pass(0.25, 0.5)).durations(config)
    assert work(durations, config) == pytest.approx({"F": 1.375, "B": 2.25, "e": 0.5, "e_b": 1.5})


def test_work_of_several_encoders_and_of_encoder_stages_is_all_of_it() -> None:
    config = config_of(4, 4, chunk_forward_s=1.0, encoder=0.5, encoder_backward=1.5)
    values = dataclasses.replace(config.parallel, encoder=EncoderParallel(pp=2))
    staged = dataclasses.replace(config, parallel=values)
    durations = emulated(staged).durations(staged)
    assert staged.pipeline.encoders[0].layers == (2, 1)
    found = work(durations, staged)
    assert (found["e"], found["e_b"]) == pytest.approx((0.5, 1.5))
    assert phased_s(staged, durations) is None, "stages wait for one another"


def test_bound_and_formula_of_two_stages_and_four_microbatches() -> None:
    f, b, e, e_b, epilogue, m = 1.0, 2.0, 0.5, 1.0, 0.125, 4
    config = config_of(chunk_forward_s=f, encoder=e, encoder_backward=e_b)
    durations = seconds(config, epilogue=epilogue).durations(config)
    text_only = (m + 2 - 1) * (f + b)
    assert text_only_s(config, durations) == text_only == 15
    # one microbatch's encoder work by both devices at once, or all work evenly shared
    assert bound_s(config, durations) == max(15 + 0.75, 4 * (3 + 0.75)) + epilogue
    assert phased_s(config, durations) == 15 + 4 * 1.5 / 2 + epilogue


def test_an_encoder_larger_than_the_bubbles_is_bounded_by_all_work_evenly_shared() -> None:
    config = config_of(chunk_forward_s=1.0, encoder=4.0, encoder_backward=8.0)
    durations = emulated(config).durations(config)
    assert bound_s(config, durations) == pytest.approx(4 * (3 + 12 / 2))
    assert bound_s(config, durations) > 15 + 12 / 2


def test_transfers_of_the_llm_count_in_all_of_them() -> None:
    """F 0-1, 1-2; stage 1: F0 1.5-2.5, B0 2.5-4.5; stage 0 gets B0's gradient at 5."""
    config = config_of(microbatches=1, chunk_forward_s=1.0, encoder=1.0, encoder_backward=2.0)
    costs = seconds(config, exchange=0.5)
    vision = dataclasses.replace(costs.encoders["vision"], feature_exchange=9.0)
    durations = dataclasses.replace(costs, encoders={"vision": vision}).durations(config)
    assert text_only_s(config, durations) == 7
    assert bound_s(config, durations) == 7 + 1.5
    assert phased_s(config, durations) is None, "one microbatch is not shared by two devices"


@pytest.mark.parametrize(("pp", "m"), [(2, 4), (4, 4), (4, 8)])
@pytest.mark.parametrize("encoder", [0.25, 1.0])
def test_the_bound_holds_and_phased_takes_what_its_formula_says(
    pp: int, m: int, encoder: float
) -> None:
    config = config_of(pp, m, chunk_forward_s=1.0, encoder=encoder, encoder_backward=2 * encoder)
    costs = seconds(config, epilogue=0.5)
    durations = costs.durations(config)
    bound = bound_s(config, durations)
    for method in ("encoder_first", "phased", "coarse", "filled"):
        plan = make_plan(config, costs, method)
        assert plan.event_driven_s + 0.5 >= bound - 1e-9
        if method == "phased":
            assert plan.event_driven_s + 0.5 == pytest.approx(phased_s(config, durations))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_hollow_model_keeps_pipeline_rows_and_emulated_costs(preset: str) -> None:
    config = from_config_dict(get_config(preset).to_dict())
    tiny = hollow(config)
    assert tiny.pipeline == config.pipeline
    assert (tiny.train, tiny.parallel, tiny.emulate) == (
        *(config.train, config.parallel, config.emulate),
    )
    assert emulated(tiny) == emulated(config)
    tp = config.parallel.tp
    assert tiny.model.sequence == 8 * tp and tiny.model.image_tokens == tp
    for part in (tiny.model.encoder, tiny.model.llm):
        assert part.width <= 8 * tp and part.hidden <= 8 * tp and part.width % part.heads == 0
    assert not [error for check in parallel_checks.CHECKS for error in check(tiny)]


def test_a_hollow_model_keeps_its_encoders_and_their_names() -> None:
    values = get_config("pp2_m4").to_dict()
    ears = {"layers": 2, "width": 30, "heads": 3, "hidden": 50, "patch": 4, "input": "audio"}
    values["model"] |= {"more_encoders": {"ears": ears}, "audio_frames": 16, "audio_bands": 5}
    tiny = hollow(from_config_dict(values))
    assert list(tiny.model.encoders) == ["vision", "ears"]
    assert (tiny.model.features_of("vision"), tiny.model.features_of("ears")) == (1, 1)
    assert tiny.model.encoders["ears"].layers == 2


def test_emulated_configurations_default_to_a_backward_of_twice_the_forward() -> None:
    found = from_config_dict(get_config("pp2_m4").to_dict()).emulate
    assert (found.backward, found.encoder_backward) == (2 * 1.0, 2 * found.encoder)
