"""Greedy decoding and caption losses with the sequential model, from weights without stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optimus_jax.config import ModelConfig
from optimus_jax.data import tokens
from optimus_jax.models.mllm import Batch, Mllm
from optimus_jax.models.weights import Params

ROWS = 256  # at a time; attention weights of thousands of rows would fill the memory


class Decoder:
    """Captions of pictures, the likeliest token at each position, and losses of given captions.
    One compilation for each number of pictures up to ROWS. Every new token runs the LLM over the
    whole sequence again: captions are short."""

    def __init__(self, model: Mllm, params: Params):
        self.model, self.params = model, params
        self._run = jax.jit(self._decode)
        self._score = jax.jit(self._losses)

    def captions(self, image_BHWC: np.ndarray) -> list[str]:
        """uint8 pictures [B, H, W, C] to one caption each."""
        out_BT = _in_parts(lambda image: self._run(self.params, image), image_BHWC)
        return [tokens.decode(row) for row in out_BT]

    def losses(self, batch: dict[str, np.ndarray]) -> np.ndarray:
        """The cross-entropy in nats of each row's caption with its end, float32 [B], for a batch as
        in training: image [B, H, W, C]; tokens, targets, weights [B, T]."""
        return _in_parts(lambda part: self._score(self.params, part), batch)

    def _losses(self, params: Params, batch: Batch) -> jax.Array:
        head = self.model.cast(params)["llm"]["head"]
        one = jax.vmap(self.model.summed_loss, (None, 0, 0, 0))
        return one(head, self.model.hidden(params, batch), batch["targets"], batch["weights"])

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


def _in_parts(function: Callable[[Any], jax.Array], rows: Any) -> np.ndarray:
    """`function` of a tree of arrays [B, ...], on ROWS rows at a time where there are more."""
    count = len(jax.tree.leaves(rows)[0])
    size = min(ROWS, count)
    parts = []
    for start in range(0, count, size):
        # the last part is filled up with repeated rows, so that it needs no compilation of its own
        wanted = np.minimum(np.arange(start, start + size), count - 1)
        parts.append(
            np.asarray(function(jax.tree.map(lambda x, k=wanted: jnp.asarray(x[k]), rows)))
        )
    return np.concatenate(parts)[:count]


def caption_accuracy(readings: list[str], captions: list[str]) -> float:
    """Share of the captions that are read right, every character of them."""
    pairs = list(zip(readings, captions, strict=True))
    return sum(reading == caption for reading, caption in pairs) / len(pairs)


def digit_accuracy(readings: list[str], captions: list[str]) -> float:
    """Share of the captions' digits that the readings have at the same place."""
    right = total = 0
    for reading, caption in zip(readings, captions, strict=True):
        read, wanted = reading.split(), caption.split()
        total += len(wanted)
        right += sum(a == b for a, b in zip(read, wanted, strict=False))
    return right / total
