"""Greedy decoding with the sequential model, from weights without stages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from optimus_jax.config import ModelConfig
from optimus_jax.data import tokens
from optimus_jax.models.mllm import Mllm
from optimus_jax.models.weights import Params


class Decoder:
    """Captions of pictures, the likeliest token at each position; one compilation for each number
    of pictures. Every new token runs the whole sequence again: captions are a few tokens long."""

    def __init__(self, model: Mllm, params: Params):
        self.model, self.params = model, params
        self._run = jax.jit(self._decode)

    def captions(self, image_BHWC: np.ndarray) -> list[str]:
        """uint8 pictures [B, H, W, C] to one caption each."""
        out_BT = np.asarray(self._run(self.params, jnp.asarray(image_BHWC)))
        return [tokens.decode(row) for row in out_BT]

    def _decode(self, params: Params, image_BHWC: jax.Array) -> jax.Array:
        c: ModelConfig = self.model.config
        prompt = jnp.asarray(tokens.prompt(c.image_tokens, c.sequence))
        start = jnp.broadcast_to(prompt, (image_BHWC.shape[0], c.sequence))

        def extend(position: jax.Array, ids_BT: jax.Array) -> jax.Array:
            batch = {"image": image_BHWC, "tokens": ids_BT}
            scores_BV = self.model.logits(params, batch)[:, position]
            # only what a caption can hold: a character or its end
            valid_V = (jnp.arange(c.vocabulary) >= tokens.EOS) & (
                jnp.arange(c.vocabulary) < tokens.SIZE
            )
            valid_V &= jnp.arange(c.vocabulary) != tokens.IMAGE
            chosen_B = jnp.argmax(jnp.where(valid_V, scores_BV, -jnp.inf), axis=-1)
            return ids_BT.at[:, position + 1].set(chosen_B.astype(ids_BT.dtype))

        # the start of the text stands right after the image tokens
        ids_BT = jax.lax.fori_loop(c.image_tokens, c.sequence - 1, extend, start)
        return ids_BT[:, c.image_tokens + 1 :]


def digit_accuracy(readings: list[str], captions: list[str]) -> float:
    """Share of the captions' digits that the readings have at the same place."""
    right = total = 0
    for reading, caption in zip(readings, captions, strict=True):
        read, wanted = reading.split(), caption.split()
        total += len(wanted)
        right += sum(a == b for a, b in zip(read, wanted, strict=False))
    return right / total
