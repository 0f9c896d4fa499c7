"""A model whose sizes all differ, so that mixed-up dimensions show, with a batch for it."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np

from optimus_jax.config import EncoderConfig, LlmConfig, ModelConfig
from optimus_jax.models.mllm import Mllm

# Without optimisation, which takes longer than it saves here.
quick_jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def small_model(dtype: str = "float32") -> Mllm:
    """6 image tokens and 5 of text; pictures of 2 x 3 patches with two channels."""
    return Mllm(
        ModelConfig(
            dtype=dtype,
            image_height=6,
            image_width=9,
            text_length=5,
            encoder=EncoderConfig(layers=3, width=12, heads=2, hidden=20, patch=3),
            projector_hidden=14,
            llm=LlmConfig(layers=2, width=24, heads=3, hidden=16),
            image_channels=2,
            vocabulary=17,
        )
    )


def random_like(shapes: Any, seed: int = 0) -> Any:
    """Random weights everywhere, also where the initial ones are 0 or 1."""
    leaves, structure = jax.tree.flatten(shapes)
    rng = np.random.default_rng(seed)
    drawn = [
        (0.3 * rng.normal(size=leaf.shape) + (leaf.ndim == 1)).astype(np.float32) for leaf in leaves
    ]
    return jax.tree.unflatten(structure, drawn)


def random_weights(model: Mllm, seed: int = 0) -> Any:
    return random_like(jax.eval_shape(model.init, jax.random.key(0)), seed)


def random_batch(model: Mllm, rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Pictures of noise; tokens at random, the image tokens scattered among them; uneven weights,
    about a third of them zero."""
    c, rng = model.config, np.random.default_rng(seed)
    shape = rows, c.sequence
    tokens = rng.integers(c.image_token + 1, c.vocabulary, shape)
    for row in tokens:
        row[rng.permutation(c.sequence)[: c.image_tokens]] = c.image_token
    size = rows, c.image_height, c.image_width, c.image_channels
    return {
        "image": rng.integers(0, 256, size).astype(np.uint8),
        "tokens": tokens.astype(np.int32),
        "targets": rng.integers(0, c.vocabulary, shape).astype(np.int32),
        "weights": (rng.random(shape) * (rng.random(shape) < 0.7)).astype(np.float32),
    }
