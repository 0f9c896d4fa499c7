"""Costs counted from operations and a table of chips."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from optimus_jax.cost.analytic import ADAMW, analytic
from optimus_jax.cost.costs import Pass
from optimus_jax.cost.hardware import HARDWARE
from tests.cost.costs_test import changed


def test_analytic_costs_name_themselves_and_follow_the_chip(values: dict[str, Any]) -> None:
    costs = analytic(changed(values, hardware="h100", model={"dtype": "bfloat16"}))
    assert costs.source == "analytic (h100)"
    chip = HARDWARE["h100"]
    # 8 rows of 49 positions, width 64, hidden 256
    flops = 8 * 49 * (2 * (4 * 64 * 64 + 2 * 64 * 256) + 4 * 49 * 64)
    assert costs.llm_layer.forward == pytest.approx(flops / (989e12 * 0.5) + 10e-6)
    assert costs.llm_layer.backward == pytest.approx(3 * flops / (989e12 * 0.5) + 10e-6)
    assert costs.exchange == pytest.approx(8 * 49 * 64 * 2 / chip.link + chip.latency)
    assert costs.llm_embedding == Pass(10e-6, 10e-6)


def test_payloads_are_twice_as_large_in_float32(values: dict[str, Any]) -> None:
    chip = HARDWARE["cpu_core"]
    payloads = [
        analytic(changed(values, model={"dtype": dtype})).exchange - chip.latency
        for dtype in ("float32", "bfloat16")
    ]
    assert payloads[0] == pytest.approx(2 * payloads[1])


def test_encoder_units_share_a_microbatch(values: dict[str, Any]) -> None:
    """Of two stages each takes half; of two tensor shards too, if the encoder is cut over none of
    them; over two encoder stages none is."""
    chip = HARDWARE["cpu_core"]
    plans: dict[str, tuple[dict[str, Any], int]] = {
        "two stages": ({"pp": 2}, 2),
        "two lanes": ({"pp": 1, "tp": 2}, 2),
        "one pipeline": ({"pp": 2, "encoder": {"pp": 2}}, 1),
    }
    wide = {"vocabulary": 84, "text_length": 48}
    one = analytic(changed(values, parallel={"pp": 1}, model=wide)).encoders["vision"]
    for name, (plan, parts) in plans.items():
        other = analytic(changed(values, parallel=plan, model=wide)).encoders["vision"]
        for part in ("layer", "input_embedding", "projector"):
            whole, share = (getattr(c, part).forward - chip.latency for c in (one, other))
            assert whole == pytest.approx(parts * share), name


def test_tensor_shards_share_a_layer_and_wait_for_one_another(values: dict[str, Any]) -> None:
    wide = {"vocabulary": 84, "text_length": 48}
    plan = {"pp": 1, "tp": 2, "encoder": {"tp": 2}}
    config = changed(values, hardware="h100", parallel=plan, model={**wide, "dtype": "bfloat16"})
    whole = changed(
        values, hardware="h100", parallel={"pp": 1}, model={**wide, "dtype": "bfloat16"}
    )
    chip, costs, alone = HARDWARE["h100"], analytic(config), analytic(whole)
    rows, width, length = config.microbatch_rows, 64, config.model.sequence
    # a gather and a scatter of half of the activations, at the attention and at the MLP
    sums = 4 * chip.nvlink.seconds(rows * length * width * 2 / 2)
    computed = alone.llm_layer.forward - chip.latency
    assert costs.llm_layer.forward == pytest.approx(computed / 2 + chip.latency + sums)
    again = 3 * computed / 2 + chip.latency + 2 * sums
    assert costs.llm_layer.backward == pytest.approx(again)
    assert costs.head - chip.latency == pytest.approx((alone.head - chip.latency) / 2)
    assert costs.window == Pass(0.0, 0.0), "without fused tasks nothing hides"
    fused = analytic(changed(values, hardware="h100", parallel={**plan, "fuse": True}, model=wide))
    sums = 4 * chip.nvlink.seconds(rows * length * width * 4 / 2)
    assert dataclasses.astuple(fused.window) == pytest.approx((sums, 2 * sums))
    for sequence, backward in ((True, 1.5), (False, 1.0)):  # gathers again, which are not kept
        kept = {**plan, "fuse": True, "recompute": "selective", "sequence_parallel": sequence}
        window = analytic(changed(values, hardware="h100", parallel=kept, model=wide)).window
        assert window.backward == pytest.approx(backward * window.forward)
    on_cores = analytic(changed(values, parallel={**plan, "fuse": True}, model=wide))
    assert on_cores.window == Pass(0.0, 0.0), "a core that communicates does not compute"


def test_a_policy_that_keeps_activations_computes_less_again(values: dict[str, Any]) -> None:
    chip = HARDWARE["cpu_core"]
    found = {
        policy: analytic(changed(values, parallel={"recompute": policy})).llm_layer
        for policy in ("full", "selective", "none")
    }
    config = changed(values)
    forward = found["full"].forward - chip.latency
    rows, length = config.microbatch_rows, config.model.sequence
    scores = 2 * rows * length**2 * 64 / (chip.flops["float32"] * chip.efficiency)
    for policy, again in (("full", forward), ("selective", scores), ("none", 0.0)):
        assert found[policy].forward == found["full"].forward
        assert found[policy].backward - chip.latency == pytest.approx(2 * forward + again)


def ring(parameters: float, devices: int, size: int = 4) -> float:
    """Seconds in which devices gather, or scatter, so many weights."""
    chip = HARDWARE["cpu_core"]
    if devices == 1:
        return 0.0
    return chip.latency + size * parameters * (devices - 1) / devices / chip.link


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize(
    ("dp", "pp", "llm_layers", "replicas"),
    [(1, 1, 2, 1), (1, 2, 1, 2), (2, 1, 2, 2), (2, 2, 1, 4)],
)
def test_weights_and_gradients_of_replicas(
    values: dict[str, Any], dp: int, pp: int, llm_layers: int, replicas: int, zero: bool
) -> None:
    """Two layers each; the encoder is whole on every device."""
    chip, layer = HARDWARE["cpu_core"], 4 * 64**2 + 2 * 64 * 256
    llm, encoder = llm_layers * layer, 2 * layer
    found = analytic(changed(values, parallel={"dp": dp, "pp": pp, "zero": zero}))
    held = llm / dp + encoder / replicas if zero else llm + encoder
    optimiser = ADAMW * held / (chip.flops["float32"] * chip.efficiency)
    own, others = ring(llm, dp), 2 * ring(encoder, replicas)
    if zero:
        assert (found.gather, found.scatter) == pytest.approx((own, own))
        assert found.epilogue == pytest.approx(others + optimiser)
    else:
        assert (found.gather, found.scatter) == (0.0, 0.0)
        assert found.epilogue == pytest.approx(2 * own + others + optimiser)
    assert not found.overlap


def test_gpus_communicate_beside_encoder_tasks(values: dict[str, Any]) -> None:
    assert analytic(changed(values, hardware="h100")).overlap


def test_every_chip_knows_every_dtype() -> None:
    for chip in HARDWARE.values():
        assert chip.flops.keys() == {"float32", "bfloat16"}
        numbers = [*chip.flops.values(), chip.link, chip.latency]
        assert min(numbers) > 0
        assert 0 < chip.efficiency <= 1
