"""The whole sequential model against a slow one, and what its loss does and does not depend on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models import slow
from tests.models.small import quick_jit, random_batch, random_weights, small_model

MODEL = small_model()
CONFIG = MODEL.config
WEIGHTS = random_weights(MODEL)
BATCH = random_batch(MODEL, 3)

# One compilation for all tests of this file.
logits = quick_jit(MODEL.logits)
loss_and_gradients = quick_jit(jax.value_and_grad(MODEL.loss))
init = quick_jit(MODEL.init)


def test_scores_and_loss_equal_the_slow_model() -> None:
    wanted = np.array(
        [
            slow.logits(WEIGHTS, image, tokens, CONFIG.encoder.patch, CONFIG.image_token)
            for image, tokens in zip(BATCH["image"], BATCH["tokens"], strict=True)
        ]
    )
    np.testing.assert_allclose(logits(WEIGHTS, BATCH), wanted, rtol=1e-3, atol=1e-3)
    total = sum(map(slow.cross_entropy, wanted, BATCH["targets"], BATCH["weights"]))
    loss, _ = loss_and_gradients(WEIGHTS, BATCH, True)
    assert (loss.shape, loss.dtype) == ((), jnp.float32)
    assert float(loss) == pytest.approx(total / BATCH["weights"].sum(), rel=1e-4)


def test_axes_have_the_weights_structure_and_ranks() -> None:
    axes, shapes = MODEL.axes(), jax.eval_shape(MODEL.init, jax.random.key(0))
    is_axes = lambda x: isinstance(x, tuple)  # noqa: E731
    assert jax.tree.structure(axes, is_leaf=is_axes) == jax.tree.structure(shapes)
    sizes = {
        "layers": {CONFIG.encoder.layers, CONFIG.llm.layers},
        "heads": {CONFIG.encoder.heads, CONFIG.llm.heads},
        "hidden": {CONFIG.encoder.hidden, CONFIG.llm.hidden, CONFIG.projector_hidden},
        "width": {CONFIG.encoder.width, CONFIG.llm.width},
        "vocabulary": {CONFIG.vocabulary},
    }
    seen = set()

    def check(names: tuple[str | None, ...], leaf: Any) -> None:
        assert len(names) == leaf.ndim
        for name, size in zip(names, leaf.shape, strict=True):
            seen.add(name)
            assert name is None or size in sizes[name]

    jax.tree.map(check, axes, shapes, is_leaf=is_axes)
    assert seen == {None, *sizes}


def test_weights_are_float32_and_stacked_by_layer() -> None:
    params = init(jax.random.key(0))
    assert {w.dtype for w in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    for part, layers in ((params["encoders"]["vision"], 3), (params["llm"], 2)):
        assert {w.shape[0] for w in jax.tree.leaves(part["layers"])} == {layers}
    assert params["llm"]["head"]["kernel"].shape == (24, 17)
    assert params["llm"]["embed"]["token"].shape == (17, 24)
    assert params["llm"]["embed"]["position"].shape == (11, 24)


def test_initial_weights_depend_on_the_key_alone_and_differ_between_parts() -> None:
    first, again, other = (init(jax.random.key(k)) for k in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    drawn = [
        (a, b)
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(other), strict=True)
        if np.std(a) > 0
    ]
    assert len(drawn) == 4 + 2 + 2 + 2 + 4 + 1  # in layers, embeddings, projector and head
    assert not any(np.any(a == b) for a, b in drawn)
    values = np.concatenate([np.ravel(a) / np.std(a) for a, _ in drawn])
    assert len(np.unique(values)) > 0.99 * len(values)


def test_every_weight_takes_part() -> None:
    _, gradients = loss_and_gradients(WEIGHTS, BATCH, True)
    flat = jax.tree_util.tree_flatten_with_path(gradients)[0]
    for path, gradient in flat:
        norm = float(np.linalg.norm(gradient))
        assert np.isfinite(norm), path
        assert norm > 1e-5, path
        if "layers" in str(path):
            assert np.abs(gradient).reshape(len(gradient), -1).max(-1).min() > 1e-6, path


def test_the_llm_is_causal() -> None:
    """The loss at position t has no gradient to the embedding of a later position."""
    params = MODEL.cast(WEIGHTS)["llm"]
    shape = 1, CONFIG.sequence, CONFIG.llm.width
    x = np.random.default_rng(4).normal(size=shape).astype(np.float32)

    def losses(x: jax.Array) -> jax.Array:
        for p in slow.layers(params["layers"]):
            x = MODEL.llm_layer(p, x)
        targets = jnp.broadcast_to(BATCH["targets"][:1], (CONFIG.sequence, CONFIG.sequence))
        one = jnp.eye(CONFIG.sequence)
        summed = lambda t, w: MODEL.summed_loss(params["head"], x, t[None], w[None])  # noqa: E731
        return jax.vmap(summed)(targets, one)

    reached = np.abs(quick_jit(jax.jacrev(losses))(x)[:, 0]).max(-1)  # [t, t']
    later = np.triu(np.ones_like(reached, bool), k=1)
    assert not reached[later].any()
    assert reached[~later].min() > 0


def test_pictures_matter_only_with_images() -> None:
    other = {**BATCH, "image": 255 - BATCH["image"]}

    def loss(params: Any, batch: Any, with_images: bool) -> float:
        return float(loss_and_gradients(params, batch, with_images)[0])

    assert loss(WEIGHTS, BATCH, True) != loss(WEIGHTS, other, True)
    assert loss(WEIGHTS, BATCH, False) == loss(WEIGHTS, other, False)
    encoder = WEIGHTS["encoders"]["vision"]
    zeros = jax.tree.map(lambda w: w * 0, encoder["projector"])
    without = {**WEIGHTS, "encoders": {"vision": {**encoder, "projector": zeros}}}
    assert loss(WEIGHTS, BATCH, False) == pytest.approx(loss(without, BATCH, True))


def test_without_images_the_encoder_has_no_gradient() -> None:
    _, gradients = loss_and_gradients(WEIGHTS, BATCH, False)
    assert not any(np.any(g) for g in jax.tree.leaves(gradients["encoders"]))
    assert all(np.any(g) for g in jax.tree.leaves(gradients["llm"]))


def test_rows_do_not_see_one_another() -> None:
    other = random_batch(MODEL, 3, seed=9)
    mixed = {name: np.concatenate([BATCH[name][:1], other[name][1:]]) for name in BATCH}
    before, after = logits(WEIGHTS, BATCH), logits(WEIGHTS, mixed)
    np.testing.assert_array_equal(before[0], after[0])
    assert np.abs(before[1:] - after[1:]).max() > 0.1


def test_bfloat16_computes_from_float32_masters() -> None:
    half = small_model("bfloat16")
    params = init(jax.random.key(0))

    def dtypes(function: Any, *arguments: Any) -> set[Any]:
        return {x.dtype for x in jax.tree.leaves(jax.eval_shape(function, *arguments))}

    assert dtypes(half.init, jax.random.key(0)) == {jnp.dtype("float32")}
    assert dtypes(half.cast, params) == {jnp.dtype("bfloat16")}
    assert dtypes(half.hidden, params, BATCH) == {jnp.dtype("bfloat16")}
    assert dtypes(half.logits, params, BATCH) == {jnp.dtype("float32")}
    assert dtypes(jax.value_and_grad(half.loss), params, BATCH) == {jnp.dtype("float32")}
    loss = float(quick_jit(half.loss)(params, BATCH))
    exact = float(loss_and_gradients(params, BATCH, True)[0])
    assert 0 < abs(loss - exact) < 0.01 * exact


def test_float32_is_computed_with_the_masters_themselves() -> None:
    jax.tree.map(np.testing.assert_array_equal, MODEL.cast(WEIGHTS), WEIGHTS)
