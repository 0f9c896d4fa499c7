"""The planner's answers to jobs small enough to work out by hand, and what they promise."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from configs import clusters, paper
from optimus_jax.cost.flops import layer_flops_forward
from optimus_jax.cost.hardware import HARDWARE
from optimus_jax.cost.transformer import MODELS, Transformer
from optimus_jax.errors import UserError
from optimus_jax.fill.placement import check
from optimus_jax.plan.answer import answer as answer_to
from optimus_jax.plan.cluster import (
    Assumptions,
    Cluster,
    EncoderSpec,
    LlmPlan,
    LlmSpec,
)
from optimus_jax.plan.cluster_checks import from_config_dict
from optimus_jax.plan.outcome import Answer

LLM = LlmSpec("own", 128, layers=2, width=64, heads=4, hidden=256)
VIT = EncoderSpec("image", 64, 16, layers=1, width=64, heads=4, hidden=256, stages=1, tp=1)
PEAK = HARDWARE["h100"].flops["bfloat16"]


def job(encoders: dict[str, EncoderSpec], frozen: bool = False, **changes: Any) -> Cluster:
    """Two ranks of one device, two microbatches. A layer of the LLM takes 1 s forward and 2 s
    backward, a microbatch of VIT 0.5 s forward and 1 s backward."""
    vit = MODELS["ViT-22B"]
    scale = layer_flops_forward(VIT.model, 16) / layer_flops_forward(vit, 16) * 64 / 4096 * 8
    assume = Assumptions(
        efficiency=layer_flops_forward(LLM.model, 128) / PEAK,
        tp_collective_s=1e-3,
        dp_exposed_s=0.0,
        vit_forward_s=0.5 / scale,
        vit_backward_s=1.0 / scale,
    )
    llm = dataclasses.replace(LLM, frozen=frozen)
    plan = LlmPlan(dp=1, pp=2, tp=1, chunks=1, microbatch=1)
    return Cluster("h100", 2, 2, llm, encoders, plan, assume, **changes)


def answer(*arguments: Any, **changes: Any) -> Answer:
    found = answer_to(job(*arguments, **changes))
    for outcome in found.outcomes.values():
        if outcome.filling:
            check(outcome.filling)
    return found


def near(value: Any) -> Any:
    """Transfers between the ranks take some microseconds."""
    return pytest.approx(value, abs=1e-3)


def test_the_timeline_by_hand() -> None:
    # 0: F0 F1 .. .. B0 B0 .. B1 B1      1: .. F0 B0 B0 F1 B1 B1 .. ..
    found = answer({"image": VIT})
    backbone = found.llm.backbone
    assert backbone.need == near((0.0, 1.0))
    assert backbone.given == near((6.0, 9.0))
    assert found.outcomes["text_only"].step == near(9.0)
    # encoder work of each device: 2 (0.5 + 1) / 2
    assert found.outcomes["phased"].step == near(9 + 1.5)
    # EF0 before 0 and EB1 after 9, the others inside
    assert found.outcomes["coarse"].step == near(9 + 0.5 + 1.0)
    # EB1 half and half on both ranks; then rank 0 has half of EF1 to do before 0 too, since it has
    # no idle time until F1, and half of EF0
    assert found.outcomes["filled"].step == near(9 + 0.5 + 0.5)
    assert found.outcomes["filled"].bounds == near((0.0, 0.5))
    assert found.outcomes["filled"].time_share == near(1 - 1.0 / 1.5)
    # 0: F0 F1 until 3, B0 from 4.5 to 7.5, B1 to 10.5      1: F0 from 1.5, B0 to 4.5, F1, B1 to 7.5
    assert found.outcomes["encoder_first"].step == near(10.5)
    assert found.recommended == "filled"


def test_a_frozen_encoder_runs_in_the_step_before() -> None:
    found = answer({"image": dataclasses.replace(VIT, frozen=True)})
    assert found.outcomes["phased"].step == near(9.5), "one forward on each rank"
    assert found.outcomes["coarse"].step == near(9.5), "within its own step"
    assert found.outcomes["filled"].step == near(9.0)
    placed = found.outcomes["filled"].filling.placed[0]  # type: ignore[union-attr]
    assert placed.backward is None
    assert placed.crosses
    assert found.outcomes["filled"].memory.encoder_activations == 0
    assert found.outcomes["filled"].memory.encoder_optimiser == 0


def test_a_frozen_llm_has_short_backwards() -> None:
    found = answer({"image": VIT}, frozen=True)
    assert found.outcomes["text_only"].step == near(3 * 2.0)
    assert found.llm.backbone.given == near((4.0, 6.0))
    assert found.outcomes["phased"].step == near(6 + 1.5)
    assert found.outcomes["filled"].memory.llm_optimiser == 0


def test_two_encoders_have_plans_of_their_own() -> None:
    audio = dataclasses.replace(VIT, name="audio", layers=2, stages=2)
    found = answer({"image": VIT, "audio": audio})
    plans = found.outcomes["filled"].plans
    assert {name: (p.pipelines, p.stages) for name, p in plans.items()} == {
        "image": (2, 1),
        "audio": (1, 2),
    }
    # image: one microbatch on each rank; audio: two through two stages of 1.5 s
    assert found.outcomes["phased"].step == near(9 + 1.5 + 3 * 1.5)
    assert "balanced has one encoder" in found.refused["balanced"]


def test_text_only_batches_have_one_method() -> None:
    found = answer({})
    assert list(found.outcomes) == ["text_only"]
    assert found.outcomes["text_only"].step == near(9.0)
    assert found.recommended == "text_only"


def test_what_cannot_fit_says_which_bytes_and_what_would() -> None:
    values = clusters.get_config("two_encoders").to_dict()
    values["memory_gb"] = 40.0
    with pytest.raises(UserError) as error:
        answer_to(from_config_dict(values))
    text = str(error.value)
    assert "no method fits in memory:\n  text_only needs 43.8 GB of 36.0 GB" in text
    assert "filled needs" in text and "no single change fits: " in text
    assert "largest are LLM activations" in text
    values["memory_gb"] = 70.0
    found = answer_to(from_config_dict(values))
    assert found.outcomes["filled"].fits
    assert not found.outcomes["coarse"].fits, "as the paper, without encoder activations"


def test_a_plan_may_hold_what_jax_takes_of_a_device() -> None:
    from optimus_jax.gpu_settings import TABLE

    (share,) = [x.value for x in TABLE if x.name == "XLA_CLIENT_MEM_FRACTION"]
    assert float(share) == Assumptions().memory_share
    for name in ("h100_8", "h100_3072"):
        cluster = from_config_dict(clusters.get_config(name).to_dict())
        assert (cluster.memory, cluster.capacity) == (80e9, 72e9)
    row = from_config_dict(paper.get_config("strong_3072").to_dict())
    assert row.capacity == 80e9, "as in the paper"
    assert job({}).capacity == 0.9 * job({}).chip.memory


def test_filling_that_does_not_pay_is_not_recommended() -> None:
    little = dataclasses.replace(VIT, width=16, hidden=64, heads=1)
    found = answer({"image": little})
    assert found.recommended == "phased"
    assert "not worth its cost" in found.reason


def test_a_model_of_ones_own_is_what_it_says() -> None:
    assert LLM.model == Transformer("own", 2, 64, 4, 256, causal=True)
