"""Operations of a step, against counts written out by hand and against the kernels that run."""

from __future__ import annotations

import dataclasses

import pytest

from optimus_jax.cost.flops import (
    Images,
    StepFlops,
    Text,
    embedding_flops_forward,
    head_flops_forward,
    hfu,
    layer_flops_forward,
    mfu,
    step_flops,
)
from optimus_jax.cost.hardware import HARDWARE
from optimus_jax.cost.kernels import layer_kernels
from optimus_jax.cost.transformer import MODELS, Transformer
from optimus_jax.errors import UserError

LLM = Transformer("llm", layers=2, width=4, heads=2, hidden=6, vocabulary=7, causal=True)
VIT = Transformer("vit", layers=3, width=2, heads=1, hidden=5)

# One position of one layer, 2 for each weight
LLM_MATRICES = 2 * (4 * 12 + 4 * 4 + 4 * 6 + 6 * 4)  # qkv, out, up, down
VIT_MATRICES = 2 * (2 * 6 + 2 * 2 + 2 * 5 + 5 * 2)
# One pair of positions of one layer: scores and mixing
LLM_PAIR, VIT_PAIR = 2 * 2 * 4, 2 * 2 * 2
HEAD = 2 * 4 * 7

# 2 rows of 10 positions; 3 real images among 5, of 4 tokens of 9 values; projector 2 -> 3 -> 4
TEXT = Text(LLM, rows=2, length=10, recompute="none")
IMAGES = Images(
    VIT,
    tokens=4,
    images_real=3,
    images_padded=5,
    patch_values=9,
    projector=(2, 3, 4),
    recompute="none",
)
PATCH = 2 * 9 * 2
FIRST, SECOND = 2 * 2 * 3, 2 * 3 * 4
LLM_LAYERS, LLM_ATTENTION = 20 * 2 * LLM_MATRICES, 2 * 10**2 * 2 * LLM_PAIR
LLM_HEAD = 20 * HEAD
VIT_LAYERS, VIT_ATTENTION = 12 * 3 * VIT_MATRICES, 3 * 4**2 * 3 * VIT_PAIR  # real images


def test_a_layers_forward_by_both_counts() -> None:
    assert layer_flops_forward(LLM, 10) == 10 * LLM_MATRICES + 100 * LLM_PAIR
    assert layer_flops_forward(LLM, 10, causal=True) == 10 * LLM_MATRICES + 50 * LLM_PAIR
    gpt = MODELS["GPT-175B"]
    h, s = 12288, 2048
    assert layer_flops_forward(gpt, s) == 24 * h**2 * s + 4 * s**2 * h


def test_head_and_embeddings() -> None:
    assert head_flops_forward(LLM, 20) == LLM_HEAD
    assert head_flops_forward(VIT, 20) == 0
    assert embedding_flops_forward(LLM, 20) == 0, "tokens are looked up"
    assert embedding_flops_forward(VIT, 12, patch_values=9) == 12 * PATCH


def test_all_trained() -> None:
    found = step_flops(TEXT, [IMAGES])
    llm = 3 * (LLM_LAYERS + LLM_ATTENTION + LLM_HEAD)
    encoder = 12 * 2 * PATCH + 3 * (VIT_LAYERS + VIT_ATTENTION)  # pixels have no gradients
    projector = 12 * 3 * (FIRST + SECOND)
    assert found.model == llm + encoder + projector
    assert found.hardware == llm + 5 / 3 * (encoder + projector)  # padded images run too
    assert step_flops(TEXT).model == llm
    assert step_flops(TEXT, [IMAGES, IMAGES]).model == llm + 2 * (encoder + projector)


def test_a_frozen_encoder_runs_its_forward_only() -> None:
    frozen = dataclasses.replace(IMAGES, trained=False, recompute="full")
    llm = step_flops(TEXT).model
    encoder = 12 * PATCH + VIT_LAYERS + VIT_ATTENTION
    # the projector's first matrix has its own gradient only, its second that of its input too
    projector = 12 * (2 * FIRST + 3 * SECOND)
    found = step_flops(TEXT, [frozen])
    assert found.model == llm + encoder + projector
    assert found.hardware == llm + 5 / 3 * (encoder + projector), "and computes nothing again"

    nothing = dataclasses.replace(frozen, projector_trained=False)
    assert step_flops(TEXT, [nothing]).model == llm + encoder + 12 * (FIRST + SECOND)


def test_a_frozen_llm_passes_gradients_to_what_is_trained_before_it() -> None:
    text = dataclasses.replace(TEXT, trained=False)
    images = dataclasses.replace(IMAGES, trained=False)
    images_alone = 12 * (PATCH + 2 * FIRST + 3 * SECOND) + VIT_LAYERS + VIT_ATTENTION
    # attention has no weights: its backward is whole
    llm = 2 * LLM_LAYERS + 3 * LLM_ATTENTION + 2 * LLM_HEAD
    assert step_flops(text, [images]).model == llm + images_alone

    still = dataclasses.replace(images, projector_trained=False)
    forward = LLM_LAYERS + LLM_ATTENTION + LLM_HEAD
    assert step_flops(text).model == forward
    assert step_flops(text, [still]).model == (
        forward + 12 * (PATCH + FIRST + SECOND) + VIT_LAYERS + VIT_ATTENTION
    )
    assert step_flops(text, [still, images]).model == step_flops(text, [images]).model + (
        12 * (PATCH + FIRST + SECOND) + VIT_LAYERS + VIT_ATTENTION
    ), "one trained projector is enough"


def test_an_encoder_may_be_trained_through_a_frozen_projector() -> None:
    images = dataclasses.replace(IMAGES, projector_trained=False)
    found = step_flops(dataclasses.replace(TEXT, trained=False), [images])
    llm = 2 * LLM_LAYERS + 3 * LLM_ATTENTION + 2 * LLM_HEAD
    encoder = 12 * 2 * PATCH + 3 * (VIT_LAYERS + VIT_ATTENTION)
    assert found.model == llm + encoder + 12 * 2 * (FIRST + SECOND)


def test_recomputation_runs_but_does_not_count() -> None:
    plain = step_flops(TEXT)
    assert plain.hardware == plain.model
    flash = step_flops(dataclasses.replace(TEXT, recompute="selective"))
    full = step_flops(dataclasses.replace(TEXT, recompute="full"))
    assert flash.model == full.model == plain.model
    assert flash.hardware - plain.hardware == LLM_ATTENTION / 2  # the scores
    assert full.hardware - flash.hardware == LLM_LAYERS + LLM_ATTENTION  # the head is not
    forward_only = Text(LLM, 2, 10, trained=False, recompute="full")
    assert step_flops(forward_only).hardware == step_flops(forward_only).model


def test_packed_segments_attend_to_themselves() -> None:
    packed = dataclasses.replace(TEXT, segments=(6, 4, 8))  # 18 of 20 positions
    pairs = 6**2 + 4**2 + 8**2
    found = step_flops(packed)
    assert found.model == 3 * (18 * (2 * LLM_MATRICES + HEAD) + pairs * 2 * LLM_PAIR)
    assert found.hardware == 3 * (20 * (2 * LLM_MATRICES + HEAD) + pairs * 2 * LLM_PAIR)
    exact = step_flops(packed, exact=True)
    assert found.model - exact.model == 3 * pairs * 2 * LLM_PAIR / 2
    assert found.hardware - exact.hardware == found.model - exact.model


def test_the_exact_count_halves_causal_attention_only() -> None:
    both, half = step_flops(TEXT, [IMAGES]), step_flops(TEXT, [IMAGES], exact=True)
    assert both.model - half.model == 3 * LLM_ATTENTION / 2


@pytest.mark.parametrize("name", ["LLAMA-70B", "ViT-22B", "GPT-175B"])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_hardware_operations_are_those_of_the_kernels(name: str, recompute: str) -> None:
    model, rows, length = dataclasses.replace(MODELS[name], vocabulary=0), 2, 2048
    found = step_flops(Text(model, rows, length, recompute=recompute), exact=True)
    layer = layer_kernels(model, rows, length, 8, HARDWARE["h100"])
    run = layer.forward + layer.backward + (layer.recompute if recompute == "full" else ())
    assert found.hardware == pytest.approx(model.layers * 8 * sum(k.flops for k in run))


def test_the_papers_operations_are_near_a_count_with_full_recompute() -> None:
    """Its iteration times and PFLOP/s make 5119.5 PFLOP for 1536 samples (table 5); what it counts
    is not stated, so only the order is checked: with recomputation, not without."""
    text = Text(MODELS["GPT-175B"], 1536, 2048, recompute="full")
    images = Images(MODELS["ViT-22B"], 2048, 1536, 1536, recompute="full")
    found = step_flops(text, [images])
    assert found.hardware == pytest.approx(5119.5e15, rel=0.01)
    assert found.model < 0.77 * 5119.5e15


def test_utilisation_is_the_papers() -> None:
    """Table 5: 5119.5 PFLOP in 10.65 s on 1536 GPUs is 480.7 PFLOP/s and 31.6 %."""
    flops, h100 = StepFlops(model=5119.5e15, hardware=2 * 5119.5e15), HARDWARE["h100"]
    assert mfu(flops, 10.65, 1536, h100) == pytest.approx(0.316, abs=1e-3)
    assert hfu(flops, 10.65, 1536, h100) == pytest.approx(2 * 0.316, abs=2e-3)
    assert mfu(flops, 10.65, 1536, h100, "float32") == pytest.approx(0.316 * 989 / 67, rel=2e-3)


def test_what_does_not_fit_is_refused_in_words() -> None:
    with pytest.raises(UserError, match="vit: 6 real images do not fit among 5 padded ones"):
        dataclasses.replace(IMAGES, images_real=6)
    with pytest.raises(UserError, match="segments of 21 positions, the longest 9, do not fit"):
        dataclasses.replace(TEXT, segments=(9, 9, 3))
    with pytest.raises(UserError, match="the longest 11, do not fit into 2 rows of 10"):
        dataclasses.replace(TEXT, segments=(11,))
    with pytest.raises(UserError, match="must be positive"):
        Text(LLM, rows=0, length=10)
    for part in (TEXT, IMAGES):
        with pytest.raises(UserError, match="no recompute 'some', only none, selective, full"):
            dataclasses.replace(part, recompute="some")  # type: ignore[type-var]
