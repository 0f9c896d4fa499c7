"""Seconds of LLM passes and encoder layers of a cluster."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from configs import clusters, paper
from optimus_jax.cost.flops import layer_flops_forward
from optimus_jax.cost.kernels import layer_kernels, save_profile
from optimus_jax.plan.cluster import Cluster, ParallelPlan
from optimus_jax.plan.cluster_checks import from_config_dict
from optimus_jax.plan.times import Times

PLAN = ParallelPlan(48, 8, 8, 12)


def cluster(values: dict[str, Any]) -> Cluster:
    return from_config_dict(values)


def strong(**assume: float) -> Cluster:
    values = paper.get_config("strong_3072").to_dict()
    values["assume"] |= assume
    return cluster(values)


def test_an_llm_layer_by_operations() -> None:
    job = strong(efficiency=0.3, p2p_busy_s=1e-3)
    # 24 h^2 s b + 4 s^2 h b with h = 12288, s = 2048, b = 2
    flops = 24 * 12288**2 * 2048 * 2 + 4 * 2048**2 * 12288 * 2
    assert 2 * layer_flops_forward(job.llm.model, 2048) == pytest.approx(flops)
    compute = flops / (8 * 989e12 * 0.3)
    forward, backward = (Times(job, PLAN).llm_pass(kind, 2) for kind in "FB")
    assert forward.seconds == pytest.approx(2 * (compute + 4 * 300e-6) + 1e-3)
    assert backward.seconds == pytest.approx(2 * (2 * compute + 4 * 300e-6) + 1e-3)
    assert len(forward.slots) == 8
    assert forward.slots[0] == pytest.approx((compute / 4, compute / 4 + 300e-6))
    inward, weights = (Times(job, PLAN).llm_pass(kind) for kind in "IW")
    assert inward.seconds + weights.seconds == pytest.approx(2 * compute + 4 * 300e-6 + 1e-3)
    assert weights.slots == ()


def test_recompute_runs_the_forward_again() -> None:
    values = paper.get_config("strong_3072").to_dict()
    values["llm"]["recompute"] = "full"
    full, kept = Times(cluster(values), PLAN), Times(strong(), PLAN)
    again = full.llm_layer().backward - kept.llm_layer().backward
    assert again == pytest.approx(kept.llm_layer().forward)
    assert len(full.llm_pass("B").slots) == 8


def test_the_encoder_layer_is_the_papers() -> None:
    job = strong()
    spec, times = job.encoders["ViT-22B"], Times(job, PLAN)
    forward, backward = (times.encoder_layer(spec, way, 8) for way in (False, True))
    assert (forward.seconds, backward.seconds) == pytest.approx((1.4e-3, 2.0e-3))
    assert forward.communication == pytest.approx(600e-6)
    one = times.encoder_layer(spec, False, 1)
    assert (one.compute, one.communication) == pytest.approx((8 * 0.8e-3, 0.0))


def test_other_encoders_scale_by_operations_and_width() -> None:
    values = paper.get_config("weak_a").to_dict()
    job = cluster(values)
    spec, times = job.encoders["ViT-11B"], Times(job, ParallelPlan(2, 4, 8, 6))
    layer = times.encoder_layer(spec, False, 8)
    vit = strong().encoders["ViT-22B"].model
    ratio = layer_flops_forward(spec.model, 256) / layer_flops_forward(vit, 256)
    assert 0.44 < ratio < 0.46
    assert layer.compute == pytest.approx(0.8e-3 * ratio)
    assert layer.communication == pytest.approx(600e-6 * 4096 / 6144)


def test_exposed_gradients_are_those_of_the_first_chunk() -> None:
    values = clusters.get_config("text_only").to_dict()
    job = cluster(values)
    plan = ParallelPlan(8, 8, 8, 12)
    gather, scatter = Times(job, plan).exposed()
    model = job.llm.model
    entries = (model.layer_parameters + model.embedding_parameters) / 8
    assert gather == pytest.approx(job.chip.network.seconds(2 * entries * 7 / 8))
    assert scatter == pytest.approx(job.chip.network.seconds(4 * entries * 7 / 8))
    assert sum(Times(strong(), PLAN).exposed()) == pytest.approx(paper.CALIBRATED["dp_exposed_s"])


def test_measured_kernels_win(tmp_path: pathlib.Path) -> None:
    values = clusters.get_config("text_only").to_dict()
    plan = ParallelPlan(8, 8, 8, 12)
    before = Times(cluster(values), plan).llm_layer().forward
    job = cluster(values)
    kernels = layer_kernels(job.llm.model, 2, 2048, 8, job.chip)
    up = next(k for k in kernels.forward if k.name == "up")
    path = tmp_path / "profile.json"
    save_profile(path, {("GPT-175B", "forward", "up"): up.seconds + 0.5})
    values["profile"] = str(path)
    assert Times(cluster(values), plan).llm_layer().forward == pytest.approx(before + 0.5)
