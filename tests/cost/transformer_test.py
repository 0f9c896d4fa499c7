"""Transformers: parameters counted by hand, and the paper's models beside its printed sizes."""

from __future__ import annotations

import pytest

from optimus_jax.cost.transformer import MODELS, Transformer
from optimus_jax.errors import UserError


def test_parameters_counted_by_hand() -> None:
    small = Transformer("small", layers=3, width=8, heads=4, hidden=20, vocabulary=11)
    assert (small.head_dim, small.kv_heads, small.kv_width) == (2, 4, 8)
    qkv, out, up, down = 8 * 24, 8 * 8, 8 * 20, 20 * 8
    assert small.layer_parameters == qkv + out + up + down == 576
    assert small.parameters == 3 * 576 + 11 * 8 + 8 * 11  # embedding and head

    lean = Transformer("lean", 3, width=8, heads=4, hidden=20, kv_heads=2, gated=True)
    q, kv, out, up, gate, down = 8 * 8, 2 * (8 * 4), 8 * 8, 8 * 20, 8 * 20, 20 * 8
    assert lean.kv_width == 4
    assert lean.layer_parameters == q + kv + out + up + gate + down == 672
    assert lean.parameters == 3 * 672


@pytest.mark.parametrize(
    ("name", "billions"),  # 12 width^2 depth, or LLaMA 2's own sizes; without embeddings
    [
        ("ViT-3B", 3.06),
        ("ViT-5B", 5.44),
        ("ViT-11B", 9.66),
        ("ViT-22B", 21.74),
        ("GPT-11B", 9.06),
        ("LLAMA-70B", 68.45),
        ("GPT-175B", 173.95),
    ],
)
def test_the_papers_models_have_their_printed_sizes(name: str, billions: float) -> None:
    model = MODELS[name]
    assert model.name == name
    assert model.layers * model.layer_parameters == pytest.approx(billions * 1e9, abs=5e6)
    assert model.head_dim == 128


def test_vocabularies_bring_models_to_their_names() -> None:
    assert MODELS["LLAMA-70B"].parameters == pytest.approx(68.98e9, abs=5e6)
    assert MODELS["GPT-175B"].parameters == pytest.approx(175.2e9, abs=1e8)
    assert MODELS["ViT-22B"].parameters == 48 * MODELS["ViT-22B"].layer_parameters


def test_llms_are_causal_and_encoders_are_not() -> None:
    assert {name for name, m in MODELS.items() if m.causal} == {"GPT-11B", "LLAMA-70B", "GPT-175B"}


def test_sizes_that_do_not_divide_are_refused_in_words() -> None:
    with pytest.raises(UserError, match="odd: 3 heads do not divide a width of 8"):
        Transformer("odd", 1, width=8, heads=3, hidden=8)
    with pytest.raises(UserError, match="odd: 3 heads of keys and values do not divide 4 heads"):
        Transformer("odd", 1, width=8, heads=4, hidden=8, kv_heads=3)
    with pytest.raises(UserError, match="sizes of a transformer must be positive"):
        Transformer("none", 0, width=8, heads=4, hidden=8)
