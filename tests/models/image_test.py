"""The input of an image encoder against a slow loop."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optimus_jax.models import image as images
from optimus_jax.models.weights import initialise
from tests.models import slow
from tests.models.small import quick_jit, random_batch, random_weights, small_model

MODEL = small_model()
CONFIG = MODEL.config


def test_patches_against_a_slow_loop() -> None:
    p = random_weights(MODEL)["encoders"]["vision"]["embed"]
    image = random_batch(MODEL, 2)["image"]
    wanted = [
        slow.patches(row, CONFIG.encoder.patch) @ p["kernel"] + p["bias"] + p["position"]
        for row in image
    ]
    found = images.embed_patches(p, image, CONFIG.encoder.patch)
    assert found.shape == (2, 6, 12)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("patch", [1, 2, 4])
def test_each_pixel_reaches_its_own_patch_alone(patch: int) -> None:
    """With the identity as kernel a patch vector is the patch itself."""
    image = np.arange(4 * 8, dtype=np.uint8).reshape(1, 4, 8, 1)
    size = patch * patch
    p = {
        "kernel": np.eye(size, dtype=np.float32),
        "bias": np.zeros(size, np.float32),
        "position": np.zeros((32 // size, size), np.float32),
    }
    found = images.embed_patches(p, image, patch)
    np.testing.assert_allclose(found[0], slow.patches(image[0], patch), atol=1e-6)


def test_black_is_minus_one_and_white_is_one() -> None:
    p = {"kernel": np.eye(1), "bias": np.zeros(1), "position": np.zeros((2, 1))}
    image = np.array([0, 255], np.uint8).reshape(1, 1, 2, 1)
    np.testing.assert_allclose(images.embed_patches(p, image, 1).ravel(), [-1, 1])


def test_pictures_are_embedded_in_the_kernels_dtype() -> None:
    p = jax.tree.map(
        lambda w: jnp.asarray(w, jnp.bfloat16), random_weights(MODEL)["encoders"]["vision"]
    )
    image = random_batch(MODEL, 1)["image"]
    run = lambda p: images.embed_patches(p, image, CONFIG.encoder.patch)  # noqa: E731
    assert jax.eval_shape(run, p["embed"]).dtype == jnp.bfloat16


def test_every_patch_looks_at_every_other() -> None:
    """Not causal: the first patch's output has a gradient to the last patch's input."""
    layer = jax.tree.map(lambda w: w[0], random_weights(MODEL)["encoders"]["vision"]["layers"])
    x = np.random.default_rng(2).normal(size=(1, 6, 12)).astype(np.float32)
    sums = lambda x: MODEL.encoder_layer("vision", layer, x).sum(-1)[0]  # noqa: E731
    jacobian = quick_jit(jax.jacrev(sums))(x)[:, 0]
    reached = np.abs(jacobian).max(-1)  # [output position, input position]
    assert reached.shape == (6, 6)
    assert reached.min() > 1e-4


def test_initial_patch_vectors_keep_the_spread_of_their_pixels() -> None:
    make = lambda key: initialise(lambda rngs: images.PatchEmbedding(rngs, CONFIG, "vision"), key)  # noqa: E731
    p = jax.tree.map(np.asarray, quick_jit(make)(jax.random.key(0)))
    assert {name: leaf.shape for name, leaf in p.items()} == {
        "kernel": (18, 12),
        "bias": (12,),
        "position": (6, 12),
    }
    assert p["kernel"].std() == pytest.approx(18**-0.5, rel=0.2)
    assert not p["bias"].any()
