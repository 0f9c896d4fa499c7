"""Bytes of states and activations by hand and by the sources' formulae; what explains a plan."""

from __future__ import annotations

import dataclasses

import pytest

from optimus_jax.cost.memory import (
    MemoryTable,
    StateBytes,
    embedding_activation_bytes,
    head_activation_bytes,
    in_flight,
    layer_activation_bytes,
    memory_overhead,
    state_bytes,
)
from optimus_jax.cost.transformer import MODELS, Transformer
from optimus_jax.errors import UserError
from optimus_jax.schedule.pipeline import gpipe, one_f_one_b
from optimus_jax.schedule.task import Kind, Pipeline, Task

GPT = MODELS["GPT-175B"]
S, B, H, A = 2048, 2, 12288, 96


def test_states_of_a_billion_parameters() -> None:
    assert state_bytes(1e9, dp=8) == StateBytes(6e9, 12e9 / 8)
    assert state_bytes(1e9, dp=8, sharded=False) == StateBytes(6e9, 12e9)
    assert state_bytes(1e9, dp=8, trained=False) == StateBytes(2e9, 0)


@pytest.mark.parametrize(("m", "gigabytes"), [(1, 0.0), (2, 2.06), (4, 6.19), (8, 14.4)])
@pytest.mark.parametrize("llm_dp", [1, 24])
def test_more_encoder_replicas_cost_what_the_paper_says(
    m: int, gigabytes: float, llm_dp: int
) -> None:
    found = memory_overhead(22e9, m * llm_dp, llm_dp, gpus=llm_dp * 64)  # PP 8, TP 8
    assert found == pytest.approx(gigabytes * 1e9, abs=5e7)
    assert memory_overhead(22e9, m, 1, 64, k=3.0) == pytest.approx(found / 2)


@pytest.mark.parametrize("tp", [1, 8])
def test_activations_of_a_plain_layer_follow_korthikanti(tp: int) -> None:
    sbh = S * B * H
    scores = 5 * A * S / H

    def bytes_of(policy: str, sequence_parallel: bool = True) -> float:
        return layer_activation_bytes(GPT, B, S, tp, policy, sequence_parallel) / sbh

    assert bytes_of("none") == pytest.approx((34 + scores) / tp)
    assert bytes_of("selective") == pytest.approx(34 / tp)
    assert bytes_of("full") == pytest.approx(2 / tp)
    assert bytes_of("none", False) == pytest.approx(10 + (24 + scores) / tp)
    assert bytes_of("selective", False) == pytest.approx(10 + 24 / tp)
    assert bytes_of("full", False) == pytest.approx(2)


def test_other_layers_count_what_they_keep() -> None:
    """Width 8, 4 heads of 2; one position; bytes of each value 2, of each mask 1."""

    def selective(tp: int = 1, **changes: object) -> float:
        plain = Transformer("small", layers=1, width=8, heads=4, hidden=20)
        model = dataclasses.replace(plain, **changes)  # type: ignore[arg-type]
        return layer_activation_bytes(model, 1, 1, tp, "selective")

    norms, inputs, masks = 2 * 2 * 8, 2 * 2 * 8, 2 * 8
    attention = 2 * 8 + 2 * 8 + 2 * 8 + 2 * 8  # query, key, value, input of out
    mlp = 2 * 20 + 2 * 20
    assert selective() == norms + inputs + masks + attention + mlp
    assert selective(gated=True) == selective() + 2 * 20
    assert selective(kv_heads=1) == selective() - 2 * 2 * 6
    assert selective(qk_norm=True) == selective() + 2 * 8 + 2 * 8
    assert selective(parallel_block=True) == selective() - (norms + inputs + masks) / 2
    # at tp 4 each device has the one head of keys and values
    assert selective(tp=4, kv_heads=1) == selective(tp=4)


def test_ends_of_the_model() -> None:
    sbh, v = S * B * H, 51200
    assert embedding_activation_bytes(GPT, B, S, 8) == sbh / 8
    assert embedding_activation_bytes(GPT, B, S, 8, sequence_parallel=False) == sbh
    assert head_activation_bytes(GPT, B, S, 8) == pytest.approx(4 * sbh / 8 * (1 + v / H))
    assert head_activation_bytes(GPT, B, S, 8, False) == pytest.approx(4 * sbh + 4 * S * B * v / 8)


def held(order: tuple[Task, ...]) -> int:
    """The most forwards without their backward at any point of an order."""
    count = most = 0
    for task in order:
        count += 1 if task.kind == Kind.F else -1
        most = max(most, count)
    return most


@pytest.mark.parametrize(
    ("stages", "chunks", "microbatches"),
    [(1, 1, 1), (1, 1, 4), (4, 1, 8), (4, 1, 2), (2, 2, 2), (4, 2, 8), (4, 3, 4), (8, 12, 16)],
)
def test_in_flight_is_what_the_orders_hold(stages: int, chunks: int, microbatches: int) -> None:
    pipe = Pipeline(stages, microbatches, chunks)
    for rank, order in enumerate(one_f_one_b(pipe)):
        assert in_flight("1f1b", stages, rank, chunks, microbatches) == held(order)
    if chunks == 1:
        for rank, order in enumerate(gpipe(pipe)):
            assert in_flight("gpipe", stages, rank, 1, microbatches) == held(order)


def test_in_flight_by_hand() -> None:
    # P 4, V 2, N 8: warm-ups of 10, 8, 6, 4 and, deferred, of 7, 6, 5, 4; one more in the steady
    assert [in_flight("1f1b", 4, r, 2, 8) for r in range(4)] == [11, 9, 7, 5]
    assert [in_flight("1f1b_deferred", 4, r, 2, 8) for r in range(4)] == [8, 7, 6, 5]
    assert [in_flight("1f1b_deferred", 4, r, 1, 8) for r in range(4)] == [4, 3, 2, 1]
    assert in_flight("gpipe", 4, 2, 2, 8) == 16
    assert in_flight("1f1b_deferred", 4, 0, 2, 3) == 6, "no more than there are"


def test_no_such_order_or_rank() -> None:
    with pytest.raises(UserError, match="no order 'zb', only 1f1b, 1f1b_deferred, gpipe"):
        in_flight("zb", 4, 0, 1, 8)
    with pytest.raises(UserError, match="rank 4 is not among 4 stages; ranks are 0 to 3"):
        in_flight("1f1b", 4, 4, 1, 8)
    with pytest.raises(UserError, match="no recompute policy 'some', only none, selective, full"):
        layer_activation_bytes(GPT, 1, 1, 1, "some")


TABLE = MemoryTable(30e9, 2e9, 40e9, 6e9, 1e9, 8e9, 4e9)


def test_a_table_adds_up_and_fits() -> None:
    assert TABLE.total == 91e9
    assert TABLE.fits(91e9) and not TABLE.fits(90.9e9)
    assert list(TABLE.rows) == [
        *("LLM weights and gradients", "LLM optimiser", "LLM activations"),
        *("encoder weights and gradients", "encoder optimiser", "encoder activations"),
        "communication buffers",
    ]
    assert list(TABLE.rows.values()) == [30e9, 2e9, 40e9, 6e9, 1e9, 8e9, 4e9]


def test_what_is_too_large_and_what_would_fit_in_words() -> None:
    assert TABLE.explain(141e9) == "needs 91.0 GB of 141.0 GB: fits, 50.0 GB to spare"
    over = (
        "needs 91.0 GB of 80.0 GB, 11.0 GB too many; largest are LLM activations 40.0 GB,"
        " LLM weights and gradients 30.0 GB, encoder activations 8.0 GB"
    )
    assert TABLE.explain(80e9) == over
    changes = {
        "tp 16": dataclasses.replace(TABLE, llm_weights_gradients=15e9),
        "full recompute": dataclasses.replace(TABLE, llm_activations=5e9),
        "2 encoder microbatches in flight": dataclasses.replace(TABLE, encoder_activations=1e9),
    }
    assert TABLE.explain(80e9, changes) == (
        f"{over}; would fit with full recompute (56.0 GB) or tp 16 (76.0 GB)"
    )
    assert TABLE.explain(50e9, changes).endswith(
        "no single change fits: full recompute (56.0 GB), tp 16 (76.0 GB),"
        " 2 encoder microbatches in flight (84.0 GB)"
    )


def test_small_figures_are_not_rounded_away_and_empty_rows_not_named() -> None:
    table = MemoryTable(llm_weights_gradients=81e9)
    assert table.explain(80.99e9) == (
        "needs 81.0 GB of 81.0 GB, 10.0 MB too many; largest are LLM weights and gradients 81.0 GB"
    )
