"""Batches without meaning, where only their shapes or the numbers themselves matter."""

from __future__ import annotations

import numpy as np

from optimus_jax.config import ModelConfig


def random_batch(config: ModelConfig, rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Pictures and spectrograms of noise, for the encoders that there are, and text of random
    tokens, with uneven weights that include zero."""
    rng = np.random.default_rng(seed)
    shape = rows, config.sequence
    tokens = rng.integers(config.image_token + 1, config.vocabulary, shape)
    for row in tokens:  # image tokens need not stand together
        row[rng.permutation(config.sequence)[: config.image_tokens]] = config.image_token
    inputs = {encoder.input for encoder in config.encoders.values()}
    batch = {}
    if "image" in inputs:
        size = config.image_height, config.image_width, config.image_channels
        batch["image"] = rng.integers(0, 256, (rows, *size)).astype(np.uint8)
    if "audio" in inputs:
        size = rows, config.audio_frames, config.audio_bands
        batch["audio"] = rng.normal(size=size).astype(np.float32)
    return batch | {
        "tokens": tokens.astype(np.int32),
        "targets": rng.integers(0, config.vocabulary, shape).astype(np.int32),
        "weights": (rng.random(shape) * (rng.random(shape) < 0.7)).astype(np.float32),
    }
