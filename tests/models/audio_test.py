"""The input of an audio encoder against a loop."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from optimus_jax.models.audio import embed_frames
from tests.models.small import modern_model, random_batch, random_weights

MODEL = modern_model()
AUDIO = random_batch(MODEL, 2)["audio"]
P = random_weights(MODEL)["encoders"]["sound"]["embed"]


def test_stretches_are_all_bands_of_a_few_frames() -> None:
    found = embed_frames(P, AUDIO, 3)
    assert found.shape == (2, 8, 24)
    for row in range(2):
        for k in range(8):
            frames = [AUDIO[row, 3 * k + i, band] for i in range(3) for band in range(5)]
            wanted = np.array(frames) @ P["kernel"] + P["bias"] + P["position"][k]
            np.testing.assert_allclose(found[row, k], wanted, rtol=1e-4, atol=1e-5)


def test_sound_is_embedded_in_the_kernels_dtype() -> None:
    half = jax.tree.map(lambda w: jnp.asarray(w, jnp.bfloat16), P)
    assert jax.eval_shape(lambda p: embed_frames(p, AUDIO, 3), half).dtype == jnp.bfloat16
