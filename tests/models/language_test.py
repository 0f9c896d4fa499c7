"""The LLM's ends: splicing features into the text, and the loss, against slow loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optimus_jax.models import language
from tests.models import slow
from tests.models.small import quick_jit, random_batch, random_weights, small_model

MODEL = small_model()
CONFIG = MODEL.config
IMAGE = CONFIG.image_token
WEIGHTS = random_weights(MODEL)["llm"]


def plain_embed(p: dict, tokens: np.ndarray, features: np.ndarray) -> jax.Array:
    return language.embed(p, tokens, features, IMAGE)


embed = quick_jit(plain_embed)


def features(rows: int, seed: int = 1) -> np.ndarray:
    shape = rows, CONFIG.image_tokens, CONFIG.llm.width
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def hidden(rows: int, seed: int = 2) -> np.ndarray:
    shape = rows, CONFIG.sequence, CONFIG.llm.width
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


PLACES = {
    "in front": [0, 1, 2, 3, 4, 5],
    "at the end": [5, 6, 7, 8, 9, 10],
    "scattered": [0, 2, 3, 7, 9, 10],
    "only some": [4, 8],
    "none": [],
}


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES.keys())
def test_image_tokens_are_replaced_in_order(places: list[int]) -> None:
    tokens = np.random.default_rng(3).integers(IMAGE + 1, CONFIG.vocabulary, (2, CONFIG.sequence))
    tokens[0, places] = IMAGE
    tokens[1, : CONFIG.image_tokens] = IMAGE  # the other row differs
    wanted = [
        slow.splice(WEIGHTS["embed"], row, feature, IMAGE)
        for row, feature in zip(tokens, features(2), strict=True)
    ]
    found = embed(WEIGHTS["embed"], tokens, features(2))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_embedding_is_linear_in_weights_and_features() -> None:
    tokens = random_batch(MODEL, 2)["tokens"]
    p, q = WEIGHTS["embed"], random_weights(MODEL, seed=5)["llm"]["embed"]
    f, g = features(2, 6), features(2, 7)

    mixed = jax.tree.map(lambda a, b: 2 * a - 3 * b, p, q)
    both = embed(mixed, tokens, 2 * f - 3 * g)
    one, other = (np.asarray(embed(w, tokens, x)) for w, x in ((p, f), (q, g)))
    np.testing.assert_allclose(both, 2 * one - 3 * other, rtol=1e-4, atol=1e-4)
    zeros = jax.tree.map(np.zeros_like, p)
    assert not np.any(embed(zeros, tokens, 0 * f))


def test_image_tokens_have_no_vector_of_their_own() -> None:
    tokens = random_batch(MODEL, 2)["tokens"]

    def total(p: dict) -> jax.Array:
        return plain_embed(p, tokens, features(2)).sum()

    gradient = np.asarray(quick_jit(jax.grad(total))(WEIGHTS["embed"])["token"])
    assert not gradient[IMAGE].any()
    used = np.setdiff1d(tokens, [IMAGE])
    counts = [(tokens == token).sum() for token in used]
    np.testing.assert_allclose(gradient[used], np.array(counts)[:, None] * np.ones((1, 24)))


def test_features_are_cast_to_the_weights_dtype() -> None:
    p = jax.tree.map(lambda w: jnp.asarray(w, jnp.bfloat16), WEIGHTS["embed"])
    tokens = random_batch(MODEL, 2)["tokens"]
    assert jax.eval_shape(plain_embed, p, tokens, features(2)).dtype == jnp.bfloat16


def test_scores_are_float32_of_the_vocabulary() -> None:
    x = hidden(2)
    found = language.logits(WEIGHTS["head"], x)
    wanted = [
        [slow.layer_norm(WEIGHTS["head"]["norm"], v) @ WEIGHTS["head"]["kernel"] for v in row]
        for row in x
    ]
    assert found.shape == (2, CONFIG.sequence, CONFIG.vocabulary)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    half = jax.tree.map(lambda w: jnp.asarray(w, jnp.bfloat16), WEIGHTS["head"])
    found = jax.eval_shape(language.logits, half, jnp.asarray(x, jnp.bfloat16))
    assert found.dtype == jnp.float32


def test_loss_is_the_weighted_sum_of_a_slow_cross_entropy() -> None:
    batch, x = random_batch(MODEL, 3), hidden(3)
    scores = np.float64(language.logits(WEIGHTS["head"], x))
    wanted = sum(map(slow.cross_entropy, scores, batch["targets"], batch["weights"]))
    found = language.summed_loss(WEIGHTS["head"], x, batch["targets"], batch["weights"])
    assert found.shape == ()
    assert float(found) == pytest.approx(wanted, rel=1e-5)


def test_large_scores_do_not_overflow() -> None:
    p = {**WEIGHTS["head"], "kernel": 1000 * WEIGHTS["head"]["kernel"]}
    batch = random_batch(MODEL, 1)
    assert np.isfinite(language.summed_loss(p, hidden(1), batch["targets"], batch["weights"]))


def test_positions_of_weight_zero_contribute_nothing() -> None:
    batch, x = random_batch(MODEL, 3), hidden(3)
    ignored = batch["weights"] == 0
    assert 5 < ignored.sum() < ignored.size - 5

    def loss(x: jax.Array, targets: np.ndarray) -> jax.Array:
        return language.summed_loss(WEIGHTS["head"], x, targets, batch["weights"])

    other = np.where(ignored, (batch["targets"] + 1) % CONFIG.vocabulary, batch["targets"])
    assert (other != batch["targets"]).sum() == ignored.sum()
    run = quick_jit(jax.value_and_grad(loss))
    value, gradient = run(x, batch["targets"])
    changed, _ = run(np.where(ignored[..., None], 5 * x + 1, x), other)
    assert float(value) == float(changed)
    reached = np.abs(gradient).max(-1)
    assert not reached[ignored].any()
    assert reached[~ignored].min() > 0
