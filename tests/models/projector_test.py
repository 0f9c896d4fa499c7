"""The projector against a slow one."""

from __future__ import annotations

import numpy as np

from optimus_jax.models.projector import project
from tests.models import slow
from tests.models.small import random_weights, small_model


def test_the_projector_is_a_norm_and_an_mlp_into_the_llms_width() -> None:
    p = random_weights(small_model())["encoders"]["vision"]["projector"]
    x = np.random.default_rng(1).normal(size=(2, 6, 12)).astype(np.float32)
    wanted = [[slow.mlp(p["mlp"], slow.layer_norm(p["norm"], v)) for v in row] for row in x]
    found = project(p, x)
    assert found.shape == (2, 6, 24)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
