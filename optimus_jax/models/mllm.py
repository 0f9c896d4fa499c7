"""The multimodal LLM as plain sequential code: what every parallel run of it must equal."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from optimus_jax.config import ModelConfig
from optimus_jax.models import audio, blocks, image, language
from optimus_jax.models.layers import Piece
from optimus_jax.models.projector import Projector, project
from optimus_jax.models.region import SEQUENTIAL, Region
from optimus_jax.models.weights import Declare, Params, initialise, logical_axes

# tokens, targets, weights [B, T]; image uint8 [B, H, W, C] and audio float32 [B, frames, bands] for
# the encoders that take them
Batch = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Mllm:
    """Encoders, each with its projector -> LLM. Weights are a nested dict without any notion of
    stages:

    encoders: by name: embed, layers [layers, ...], projector;
    llm: embed, layers [layers, ...], head.
    With `recompute`, a gradient of `loss` computes each layer again and keeps its input only.
    """

    config: ModelConfig
    recompute: bool = False

    def _declared(self) -> dict[tuple[str, ...], tuple[Declare, int | None]]:
        c = self.config
        parts: dict[tuple[str, ...], tuple[Declare, int | None]] = {}
        for name, encoder in c.encoders.items():
            parts |= {
                ("encoders", name, "embed"): (partial(self._declare_input, name), None),
                ("encoders", name, "layers"): (blocks.declare(encoder), encoder.layers),
                ("encoders", name, "projector"): (partial(self._declare_projector, name), None),
            }
        return parts | {
            ("llm", "embed"): (lambda rngs: language.Embedding(rngs, c), None),
            ("llm", "layers"): (blocks.declare(c.llm), c.llm.layers),
            ("llm", "head"): (lambda rngs: language.Head(rngs, c), None),
        }

    def _declare_input(self, name: str, rngs: nnx.Rngs) -> nnx.Module:
        audible = self.config.encoders[name].input == "audio"
        kind = audio.FrameEmbedding if audible else image.PatchEmbedding
        return kind(rngs, self.config, name)

    def _declare_projector(self, name: str, rngs: nnx.Rngs) -> nnx.Module:
        return Projector(rngs, self.config, name)

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

    def embed_input(
        self, name: str, p: Params, x: jax.Array, region: Region = SEQUENTIAL
    ) -> jax.Array:
        """An encoder's pictures [B, H, W, C] or spectrograms [B, frames, bands] to its first
        layer's input [B, P, encoder width]."""
        encoder = self.config.encoders[name]
        if encoder.input == "audio":
            return audio.embed_frames(p, x, encoder.patch, region)
        return image.embed_patches(p, x, encoder.patch, region)

    def encoder_layer(
        self, name: str, p: Params, x: jax.Array, region: Region = SEQUENTIAL
    ) -> jax.Array:
        return blocks.run(self.encoder_pieces(name), p, x, region)

    def encoder_pieces(self, name: str) -> tuple[Piece, ...]:
        """The steps of an encoder's layer: see blocks.pieces."""
        return blocks.pieces(self.config.encoders[name])

    def project(self, name: str, p: Params, x: jax.Array, region: Region = SEQUENTIAL) -> jax.Array:
        """The last layer's output to features [B, P, LLM width], whole on every rank."""
        return project(p, x, region)

    def embed_text(
        self, p: Params, tokens: jax.Array, features: jax.Array, region: Region = SEQUENTIAL
    ) -> jax.Array:
        """Tokens [B, T] and features [B, image tokens, D], those of all encoders in order, to the
        first LLM layer's input; linear in weights and features."""
        return language.embed(p, tokens, features, self.config.image_token, region)

    def llm_layer(self, p: Params, x: jax.Array, region: Region = SEQUENTIAL) -> jax.Array:
        return blocks.run(self.llm_pieces(), p, x, region)

    def llm_pieces(self) -> tuple[Piece, ...]:
        """The steps of an LLM layer."""
        return blocks.pieces(self.config.llm)

    def summed_loss(
        self,
        p: Params,
        x: jax.Array,
        targets: jax.Array,
        weights: jax.Array,
        region: Region = SEQUENTIAL,
    ) -> jax.Array:
        return language.summed_loss(p, x, targets, weights, region)

    # The sequential model.

    def hidden(
        self, params: Params, batch: Batch, with_images: bool | jax.Array = True
    ) -> jax.Array:
        """The last LLM layer's output [B, T, D] in the compute dtype."""
        p = self.cast(params)
        again = jax.checkpoint if self.recompute else lambda layer: layer
        features = []
        for name, encoder in self.config.encoders.items():
            own = p["encoders"][name]
            x = self.embed_input(name, own["embed"], batch[encoder.input])
            x = _stack(again(partial(self.encoder_layer, name)), own["layers"], x)
            features.append(self.project(name, own["projector"], x))
        seen = jnp.where(with_images, jnp.concatenate(features, axis=1), 0)
        x = self.embed_text(p["llm"]["embed"], batch["tokens"], seen)
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
        return language.logits(self.cast(params)["llm"]["head"], self.hidden(params, batch))

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
