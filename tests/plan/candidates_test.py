"""Parallel plans of LLM and encoders, and the warm-up that is chosen."""

from __future__ import annotations

from typing import Any

import pytest

from configs import clusters, paper
from optimus_jax.errors import UserError
from optimus_jax.plan import candidates
from optimus_jax.plan.cluster import Cluster, ParallelPlan
from optimus_jax.plan.cluster_checks import from_config_dict

PLAN = ParallelPlan(48, 8, 8, 12)


def strong(**changes: Any) -> Cluster:
    values = paper.get_config("strong_3072").to_dict()
    for path, value in changes.items():
        group, _, name = path.partition("__")
        values[group][name] = value
    return from_config_dict(values)


def test_encoder_plans_divide_the_llms() -> None:
    job = strong()
    plans = candidates.encoder_plans(job, PLAN, job.encoders["ViT-22B"], None)
    found = {(p.stages, 8 // p.copies): p.pipelines for p in plans}
    # PP_enc and TP_enc among 1, 2, 4, 8, and no more pipelines than the 16 microbatches
    assert found == {
        (1, 8): 8,
        (1, 4): 16,
        (2, 8): 4,
        (2, 4): 8,
        (2, 2): 16,
        (4, 8): 2,
        (4, 4): 4,
        (4, 2): 8,
        (4, 1): 16,
        (8, 8): 1,
        (8, 4): 2,
        (8, 2): 4,
        (8, 1): 8,
    }
    for plan in plans:
        assert sum(plan.forward.counts) == 48 * 3
        tp = 8 // plan.copies
        assert plan.forward.whole.compute == pytest.approx(0.8e-3 / 3 * 8 / tp)


def test_a_cut_makes_kernels_that_fit() -> None:
    job = strong()
    (plan,) = [
        p
        for p in candidates.encoder_plans(job, PLAN, job.encoders["ViT-22B"], 300e-6)
        if (p.stages, p.copies) == (8, 1)
    ]
    assert plan.backward is not None
    assert plan.forward.whole.compute == pytest.approx(0.8e-3 / 3)
    assert plan.backward.whole.compute == pytest.approx(1.4e-3 / 6), "two of 0.467 ms"
    assert plan.backward.counts == (6 * 6,) * 8
    assert plan.seconds == pytest.approx(48 * 3.4e-3)


def test_a_fixed_encoder_plan_that_cannot_be() -> None:
    values = paper.get_config("strong_3072").to_dict()
    values["encoders"]["ViT-22B"] |= {"stages": 1, "tp": 1}
    job = from_config_dict(values)
    with pytest.raises(UserError, match="16 microbatches or fewer pipelines"):
        candidates.encoder_plans(job, PLAN, job.encoders["ViT-22B"], None)


def test_deferral_is_free_where_transfers_occupy_the_device() -> None:
    free = candidates.llm_timeline(strong(), PLAN)
    assert free.deferred
    assert free.deferral_s == pytest.approx(0, abs=1e-9)
    priced = candidates.llm_timeline(strong(assume__p2p_busy_s=0.0), PLAN)
    assert not priced.deferred
    assert 0 < priced.deferral_s < 0.05 * priced.backbone.step


def test_the_search_takes_the_fastest_plan_that_fits() -> None:
    job = from_config_dict(clusters.get_config("h100_64").to_dict())
    chosen = candidates.best_llm_plan(job)
    plans = list(candidates.llm_plans(job))
    assert len(plans) > 30
    assert all(p.dp * p.pp * p.tp == 64 for p in plans)
    fitting = [p for p in plans if candidates._least_memory(job, p).fits(job.capacity)]
    assert chosen.plan in fitting
    near = sorted(fitting, key=lambda p: candidates._formula(job, p))[:8]
    steps = [candidates.llm_timeline(job, plan).backbone.step for plan in near]
    assert chosen.backbone.step <= min(steps) + 1e-9


def test_no_plan_says_what_was_asked() -> None:
    values = clusters.get_config("h100_64").to_dict()
    values["batch"] = 7
    with pytest.raises(UserError, match="with a batch of 7 in microbatches of 2"):
        candidates.best_llm_plan(from_config_dict(values))
    values["batch"], values["memory_gb"] = 128, 1.0
    with pytest.raises(UserError, match="no plan of LLM and encoders fits; nearest is dp"):
        candidates.best_llm_plan(from_config_dict(values))
