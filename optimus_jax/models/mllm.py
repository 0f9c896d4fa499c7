"""The multimodal LLM as plain sequential code: what every parallel run of it must equal."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from optimus_jax.config import ModelConfig
from optimus_jax.models import gpt, vit
from optimus_jax.models.layers import Block, block
from optimus_jax.models.weights import Declare, Params, initialise, logical_axes

Batch = dict[str, jax.Array]  # image uint8 [B, H, W, C]; tokens, targets, weights [B, T]


@dataclasses.dataclass(frozen=True)
class Mllm:
    """ViT -> projector -> GPT. Weights are a nested dict without any notion of stages:

    encoder: embed, layers [layers, ...];  projector;  llm: embed, layers [layers, ...], head.
    With `recompute`, a gradient of `loss` computes each layer again and keeps its input only.
    """

    config: ModelConfig
    recompute: bool = False

    def _declared(self) -> dict[tuple[str, ...], tuple[Declare, int | None]]:
        c = self.config

        def blocks(part: object) -> Declare:
            sizes = (part.width, part.heads, part.hidden, part.layers)  # type: ignore[attr-defined]
            return lambda rngs: Block(rngs, *sizes)

        return {
            ("encoder", "embed"): (lambda rngs: vit.PatchEmbedding(rngs, c), None),
            ("encoder", "layers"): (blocks(c.encoder), c.encoder.layers),
            ("projector",): (lambda rngs: vit.Projector(rngs, c), None),
            ("llm", "embed"): (lambda rngs: gpt.Embedding(rngs, c), None),
            ("llm", "layers"): (blocks(c.llm), c.llm.layers),
            ("llm", "head"): (lambda rngs: gpt.Head(rngs, c), None),
        }

    def init(self, key: jax.Array) -> Params:
        """float32 weights; a part's values depend on the key and its place in the tree only."""
        declared = self._declared()
        keys = jax.random.split(key, len(declared))
        parts = [
            (path, initialise(declare, k, layers))
            for k, (path, (declare, layers)) in zip(keys, declared.items(), strict=True)
        ]
        return _tree(parts)

    def axes(self) -> Params:
        """The logical axis names of every weight, in the same tree."""
        return _tree(
            [
                (path, logical_axes(declare, stacked=layers is not None))
                for path, (declare, layers) in self._declared().items()
            ]
        )

    # The stage functions: an executor composes these, `loss` composes them in a row.

    def embed_image(self, p: Params, image: jax.Array) -> jax.Array:
        """Pictures [B, H, W, C] to the first encoder layer's input [B, P, encoder width]."""
        return vit.embed_patches(p, image, self.config.encoder.patch)

    def encoder_layer(self, p: Params, x: jax.Array) -> jax.Array:
        return block(p, x, causal=False)

    def project(self, p: Params, x: jax.Array) -> jax.Array:
        """The last encoder layer's output to features [B, P, LLM width]."""
        return vit.project(p, x)

    def embed_text(self, p: Params, tokens: jax.Array, features: jax.Array) -> jax.Array:
        """Tokens [B, T] and features to the first LLM layer's input; linear in both."""
        return gpt.embed(p, tokens, features, self.config.image_token)

    def llm_layer(self, p: Params, x: jax.Array) -> jax.Array:
        return block(p, x, causal=True)

    def summed_loss(
        self, p: Params, x: jax.Array, targets: jax.Array, weights: jax.Array
    ) -> jax.Array:
        return gpt.summed_loss(p, x, targets, weights)

    # The sequential model.

    def hidden(
        self, params: Params, batch: Batch, with_images: bool | jax.Array = True
    ) -> jax.Array:
        """The last LLM layer's output [B, T, D] in the compute dtype."""
        p = self.cast(params)
        x = self.embed_image(p["encoder"]["embed"], batch["image"])
        again = jax.checkpoint if self.recompute else lambda layer: layer
        x = _stack(again(self.encoder_layer), p["encoder"]["layers"], x)
        features = jnp.where(with_images, self.project(p["projector"], x), 0)
        x = self.embed_text(p["llm"]["embed"], batch["tokens"], features)
        return _stack(again(self.llm_layer), p["llm"]["layers"], x)

    def loss(self, params: Params, batch: Batch, with_images: bool | jax.Array = True) -> jax.Array:
        """Mean cross-entropy over the weighted positions of the whole batch, one float32.

        Without images every feature is zero, which is what the method text_only trains.
        """
        x, head = self.hidden(params, batch, with_images), self.cast(params)["llm"]["head"]
        total = self.summed_loss(head, x, batch["targets"], batch["weights"])
        return total / jnp.sum(batch["weights"])

    def logits(self, params: Params, batch: Batch) -> jax.Array:
        """float32 scores of the next token at every position [B, T, V]."""
        return gpt.logits(self.cast(params)["llm"]["head"], self.hidden(params, batch))

    def cast(self, params: Params) -> Params:
        """The weights in the compute dtype."""
        return jax.tree.map(lambda w: w.astype(self.config.dtype), params)


def _stack(layer: object, stacked: Params, x: jax.Array) -> jax.Array:
    """Runs `layer` once for each entry of the stacked weights."""
    step = partial(lambda layer, x, p: (layer(p, x), None), layer)
    return jax.lax.scan(step, x, stacked)[0]


def _tree(parts: list[tuple[tuple[str, ...], Params]]) -> Params:
    tree: Params = {}
    for path, values in parts:
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = values
    return tree
