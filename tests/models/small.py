"""A model whose sizes all differ, so that mixed-up dimensions show, with a batch for it."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np

from optimus_jax.config import EncoderConfig, LlmConfig, ModelConfig
from optimus_jax.data import noise
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


def modern_model(dtype: str = "float32") -> Mllm:
    """Pictures and sound into a LLaMA with grouped queries: 4 + 8 image tokens and 8 of text.
    All that may be cut over a tensor axis divides by 4."""
    return Mllm(
        ModelConfig(
            dtype=dtype,
            image_height=4,
            image_width=4,
            text_length=8,
            encoder=EncoderConfig(2, width=16, heads=4, hidden=28, patch=2, block="vit22b"),
            projector_hidden=20,
            llm=LlmConfig(2, width=48, heads=8, hidden=36, block="llama", kv_heads=4),
            vocabulary=24,
            audio_frames=24,
            audio_bands=5,
            more_encoders={
                "sound": EncoderConfig(1, 24, heads=4, hidden=12, patch=3, input="audio")
            },
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
    return noise.random_batch(model.config, rows, seed)
