"""What each kind of task computes: forward and backward of LLM chunks and encoder units.

A forward writes the input of each layer into its slot; a backward is a reverse loop that takes the
vjp of one layer at its saved input and hands the gradient down. Any range of layers thus needs one
compilation, and nothing is differentiated through a loop.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optimus_jax.models.mllm import Batch, Mllm
from optimus_jax.models.weights import Params
from optimus_jax.runtime.buffers import add_at, get, put, when
from optimus_jax.runtime.carry import Carry, Row


class Tasks:
    """The tasks of one device. `params` are its shards in the compute dtype, LLM layers
    [chunks, layers, ...]; `batch` its replica's rows: tokens, targets, weights [M, rows, T], images
    [M, units, unit rows, H, W, C]; `scale` the loss gradient of one weighted position."""

    def __init__(self, model: Mllm, params: Params, batch: Batch, scale: jax.Array):
        self.model, self.params, self.batch, self.scale = model, params, batch, scale

    # Each task: (carry, row) -> carry, run when the row names its kind.

    def forward(self, c: Carry, row: Row) -> Carry:
        """F: the chunk's layers; before them the embedding in the first virtual stage, after them
        the head with the loss and its gradient in the last."""

        def embed(zero: jax.Array, saved: jax.Array) -> jax.Array:
            return self._embed(row.at(zero), c.feature, saved)

        def receive(zero: jax.Array, saved: jax.Array) -> jax.Array:
            return put(saved, get(c.wire, row.read + zero), row.saved, 0)

        saved = when(row.first == 1, embed, c.saved)

        saved = when(row.first == 0, receive, saved)

        def layer(i: jax.Array, saved: jax.Array) -> jax.Array:
            y = self.model.llm_layer(self._llm_layer(row, i), get(saved, row.saved, i))
            return put(saved, y, row.saved, i + 1)

        c = c._replace(saved=lax.fori_loop(0, row.layers, layer, saved))

        def send(zero: jax.Array, c: Carry) -> Carry:
            y = get(c.saved, row.saved + zero, row.layers)
            return c._replace(wire=put(c.wire, y, row.write)).after(y)

        c = when(row.last == 0, send, c)
        return when(row.last == 1, lambda zero, c: self._head(row.at(zero), c), c)

    def _embed(self, row: Row, feature: jax.Array, saved: jax.Array) -> jax.Array:
        units = row.feature.shape[0]
        taken = [get(feature, row.feature[u]) for u in range(units)]
        # a microbatch without encoder work has no features: zero, as in the model without images
        taken = [jnp.where(row.feature[u] < 0, 0, value) for u, value in enumerate(taken)]
        tokens = self.batch["tokens"][row.microbatch]
        x = self.model.embed_text(self.params["llm"]["embed"], tokens, jnp.concatenate(taken))
        return put(saved, x, row.saved, 0)

    def _head(self, row: Row, c: Carry) -> Carry:
        x = get(c.saved, row.saved, row.layers)
        targets, weights = (self.batch[k][row.microbatch] for k in ("targets", "weights"))

        def loss(p: Params, x: jax.Array) -> jax.Array:
            return self.model.summed_loss(p, x, targets, weights)

        total, vjp = jax.vjp(loss, self.params["llm"]["head"], x)
        dp, dx = vjp(self.scale)
        grads = _add(c.grads, ("llm", "head"), dp)
        return c._replace(
            wire=put(c.wire, dx, row.write),
            grads=grads,
            loss=c.loss + total * self.scale,
        ).after(dx)

    def backward(self, c: Carry, row: Row) -> Carry:
        """B: the chunk's layers in reverse, then the embedding in the first virtual stage."""

        def layer(k: jax.Array, carry: tuple[jax.Array, Params]) -> tuple[jax.Array, Params]:
            dy, grads = carry
            i = row.layers - 1 - k
            x = get(c.saved, row.saved, i)
            _, vjp = jax.vjp(self.model.llm_layer, self._llm_layer(row, i), x)
            dp, dx = vjp(dy)
            return dx, add_at(grads, dp, row.chunk, i)

        carry = get(c.wire, row.read), c.grads["llm"]["layers"]
        dx, layers = lax.fori_loop(0, row.layers, layer, carry)
        c = c._replace(grads=_with(c.grads, ("llm", "layers"), layers)).after(dx)

        def send(zero: jax.Array, c: Carry) -> Carry:
            return c._replace(wire=put(c.wire, dx, row.write + zero))

        def embed(zero: jax.Array, carry: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
            return carry[0], self._embed_backward(row.at(zero), *carry)

        c = when(row.first == 0, send, c)
        return when(row.first == 1, embed, (dx, c))[1]

    def _embed_backward(self, row: Row, dx: jax.Array, c: Carry) -> Carry:
        units = row.feature.shape[0]
        rows, *rest = c.feature.shape[1:]
        tokens = self.batch["tokens"][row.microbatch]
        features = jnp.zeros((units * rows, *rest), c.feature.dtype)  # linear: any will do
        _, vjp = jax.vjp(
            lambda p, f: self.model.embed_text(p, tokens, f), self.params["llm"]["embed"], features
        )
        dp, df = vjp(dx)
        feature = c.feature
        for u in range(units):
            feature = put(feature, df[u * rows : (u + 1) * rows], row.feature[u])
        return c._replace(feature=feature, grads=_add(c.grads, ("llm", "embed"), dp))

    def encoder_forward(self, c: Carry, row: Row) -> Carry:
        """EF: layers [begin, end) of each named unit; the patch embedding before the first layer,
        the projector after the last."""
        layers = c.encoder.shape[1] - 1

        def unit(k: jax.Array, c: Carry) -> Carry:
            slot = row.encoder[k]

            def embed(zero: jax.Array, encoder: jax.Array) -> jax.Array:
                image = self.batch["image"][row.microbatch + zero, row.unit[k]]
                x = self.model.embed_image(self.params["encoder"]["embed"], image)
                return put(encoder, x, slot, 0)

            def layer(i: jax.Array, encoder: jax.Array) -> jax.Array:
                y = self.model.encoder_layer(self._encoder_layer(i), get(encoder, slot, i))
                return put(encoder, y, slot, i + 1)

            def project(zero: jax.Array, c: Carry) -> Carry:
                x = get(c.encoder, slot + zero, layers)
                y = self.model.project(self.params["projector"], x)
                return c._replace(feature=put(c.feature, y, row.feature[k]))

            encoder = when(row.begin == 0, embed, c.encoder)
            encoder = lax.fori_loop(row.begin, row.end, layer, encoder)
            c = c._replace(encoder=encoder).after(get(encoder, slot, row.end))
            return when(row.end == layers, project, c)

        return lax.fori_loop(0, row["count"], unit, c)

    def encoder_backward(self, c: Carry, row: Row) -> Carry:
        """EB: the same in reverse. Between two ranges of a unit the gradient waits in the place of
        the layer input that it belongs to."""
        layers = c.encoder.shape[1] - 1
        Gradient = tuple[jax.Array, Params]

        def unit(k: jax.Array, c: Carry) -> Carry:
            slot = row.encoder[k]

            def project(zero: jax.Array, carry: Gradient) -> Gradient:
                x = get(c.encoder, slot + zero, layers)
                _, vjp = jax.vjp(self.model.project, self.params["projector"], x)
                dp, dx = vjp(get(c.feature, row.feature[k] + zero))
                return dx, _add(carry[1], ("projector",), dp)

            def layer(j: jax.Array, carry: Gradient) -> Gradient:
                dy, grads = carry
                i = row.end - 1 - j
                x = get(c.encoder, slot, i)
                _, vjp = jax.vjp(self.model.encoder_layer, self._encoder_layer(i), x)
                dp, dx = vjp(dy)
                return dx, add_at(grads, dp, i)

            dy, grads = when(row.end == layers, project, (get(c.encoder, slot, row.end), c.grads))
            stack = grads["encoder"]["layers"]
            dx, stack = lax.fori_loop(0, row.end - row.begin, layer, (dy, stack))
            c = c._replace(grads=_with(grads, ("encoder", "layers"), stack)).after(dx)

            def embed(zero: jax.Array, c: Carry) -> Carry:
                image = self.batch["image"][row.microbatch + zero, row.unit[k]]
                _, vjp = jax.vjp(
                    lambda p: self.model.embed_image(p, image), self.params["encoder"]["embed"]
                )
                return c._replace(grads=_add(c.grads, ("encoder", "embed"), vjp(dx)[0]))

            def wait(zero: jax.Array, c: Carry) -> Carry:
                return c._replace(encoder=put(c.encoder, dx, slot + zero, row.begin))

            return when(row.begin == 0, embed, when(row.begin > 0, wait, c))

        return lax.fori_loop(0, row["count"], unit, c)

    def _llm_layer(self, row: Row, i: jax.Array) -> Params:
        return jax.tree.map(lambda w: w[row.chunk, i], self.params["llm"]["layers"])

    def _encoder_layer(self, i: jax.Array) -> Params:
        return jax.tree.map(lambda w: w[i], self.params["encoder"]["layers"])


def _with(tree: Params, path: tuple[str, ...], value: Any) -> Params:
    """The tree with the part at `path` replaced."""
    first, *rest = path
    return {**tree, first: _with(tree[first], tuple(rest), value) if rest else value}


def _add(tree: Params, path: tuple[str, ...], value: Any) -> Params:
    """The tree with `value` added to the part at `path`."""
    part = tree
    for name in path:
        part = part[name]
    return _with(tree, path, add_at(part, value))
