"""The LLM alone under every order."""

from __future__ import annotations

import pytest

from configs import paper
from optimus_jax.plan.cluster import ParallelPlan
from optimus_jax.plan.cluster_checks import from_config_dict
from optimus_jax.plan.orders import orders
from optimus_jax.plan.times import Times


def test_steps_and_memory_by_formula() -> None:
    job = from_config_dict(paper.get_config("strong_3072").to_dict())
    plan = ParallelPlan(48, 8, 8, 12)
    found = orders(job, plan)
    assert set(found) == {
        "gpipe",
        "1f1b",
        "interleaved_1f1b",
        "looped_bfs",
        "interleaved_zero_bubble",
        "zb_h1",
        "zb_v",
    }
    times = Times(job, plan)
    whole = times.llm_pass("F", 12).seconds + times.llm_pass("B", 12).seconds
    chunk = times.llm_pass("F").seconds + times.llm_pass("B").seconds
    exposed, n = sum(times.exposed()), 16
    assert found["1f1b"].step == pytest.approx(exposed + (n + 7) * whole)
    assert found["gpipe"].step == pytest.approx(found["1f1b"].step)
    assert found["interleaved_1f1b"].step == pytest.approx(exposed + (n * 12 + 7) * chunk)
    assert found["zb_h1"].step < found["1f1b"].step
    assert found["interleaved_zero_bubble"].step < found["interleaved_1f1b"].step
    assert found["gpipe"].held == n
    assert found["1f1b"].held == 8
    assert found["zb_h1"].held == 8, "no more than 1F1B"
    assert found["looped_bfs"].held == n
    # 2 (P - 1) + (V - 1) P + 1 chunk passes
    assert found["interleaved_1f1b"].held == pytest.approx((14 + 88 + 1) / 12)
    idle = exposed + 7 * chunk
    assert found["interleaved_1f1b"].idle == pytest.approx(idle / found["interleaved_1f1b"].step)


def test_orders_that_do_not_exist_are_left_out() -> None:
    values = paper.get_config("strong_3072").to_dict()
    values["batch"] = 48 * 2 * 9
    values["parallel"]["chunks"] = 1
    found = orders(from_config_dict(values), ParallelPlan(48, 8, 8, 12))
    assert "interleaved_1f1b" in found and "gpipe" in found
    values["batch"] = 48 * 2 * 17
    found = orders(from_config_dict(values), ParallelPlan(48, 8, 8, 12))
    assert "interleaved_1f1b" not in found, "17 microbatches make no two equal groups of 8"
