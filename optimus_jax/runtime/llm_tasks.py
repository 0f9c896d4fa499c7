"""What the LLM's tasks compute: forward and backward of a chunk's layers for a microbatch.

As in runtime/encoder_tasks.py: a forward leaves the input of each layer in its slot, a backward is
a reverse loop over vjps of single layers. The first layers of a fused task have encoder layers
beside them (runtime/fused_layers.py).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from optimus_jax.models.mllm import Batch, Mllm
from optimus_jax.models.region import Kept, Recording, Region
from optimus_jax.models.weights import Params
from optimus_jax.parallel.mesh import Axes
from optimus_jax.runtime.buffers import add_at, get, keep, kept_at, put, when
from optimus_jax.runtime.carry import Carry, Row
from optimus_jax.runtime.encoder_tasks import EncoderTasks
from optimus_jax.runtime.fused_layers import FusedLayers
from optimus_jax.schedule.task import EncoderPipeline


@dataclasses.dataclass(frozen=True)
class LlmTasks:
    """The tasks of one device. `params` are its shards in the compute dtype, layers [chunks, layers
    of the stage, ...]; `batch` its replica's tokens, targets and weights [M, rows, T]; `scale` the
    loss gradient of one weighted position; `names` the activations that a backward does not compute
    again. `encoders` run inside fused tasks, with `fuse`; `lanes` has each encoder's lane axes and
    their extent, `pipes` its pipeline's sizes. Without `tied` fused work is not bound to
    collectives.
    """

    model: Mllm
    params: Params
    batch: Batch
    scale: jax.Array
    region: Region
    names: tuple[str, ...]
    encoders: tuple[EncoderTasks, ...]
    pipes: tuple[EncoderPipeline, ...]
    lanes: tuple[tuple[Axes, int], ...]
    fuse: bool = False
    tied: bool = True

    # Each task: (carry, row) -> carry, run when the row names its kind.

    def forward(self, c: Carry, row: Row) -> Carry:
        """F: the chunk's layers; before them the embedding in the first virtual stage, after them
        the head with the loss and its gradient in the last."""
        with jax.named_scope("llm_forward"):

            def embed(zero: jax.Array, c: Carry) -> Carry:
                with jax.named_scope("embed"):
                    return self._embed(row.at(zero), c)

            def receive(zero: jax.Array, c: Carry) -> Carry:
                return c._replace(saved=put(c.saved, get(c.wire, row.read + zero), row.saved, 0))

            c = when(row.first == 1, embed, c)
            c = when(row.first == 0, receive, c)
            start: int | jax.Array = 0
            for encoder in self.encoders if self.fuse else ():
                start, c = FusedLayers(self, encoder).forward(c, row, start)

            def layer(i: jax.Array, c: Carry) -> Carry:
                region = Recording(self.region, self.names)
                y = self.model.llm_layer(self.layer(row, i), get(c.saved, row.saved, i), region)
                return self.save(c, row, i, y, region)

            c = lax.fori_loop(start, row.layers, layer, c)

            def send(zero: jax.Array, c: Carry) -> Carry:
                y = get(c.saved, row.saved + zero, row.layers)
                return c._replace(wire=put(c.wire, y, row.write)).after(y)

            def head(zero: jax.Array, c: Carry) -> Carry:
                with jax.named_scope("head"):
                    return self._head(row.at(zero), c)

            return when(row.last == 1, head, when(row.last == 0, send, c))

    def backward(self, c: Carry, row: Row) -> Carry:
        """B: the chunk's layers in reverse, then the embedding in the first virtual stage."""
        with jax.named_scope("llm_backward"):
            dx, start = get(c.wire, row.read), jnp.int32(0)
            for encoder in self.encoders if self.fuse else ():
                start, dx, c = FusedLayers(self, encoder).backward(c, row, start, dx)

            def layer(j: jax.Array, carry: tuple[jax.Array, Params]) -> tuple[jax.Array, Params]:
                dy, grads = carry
                i = row.layers - 1 - j
                x, kept = get(c.saved, row.saved, i), kept_at(c.kept, row.saved, i)
                dp, dx = self.layer_vjp(row, i, x, Kept(self.region, kept), dy)
                return dx, add_at(grads, dp, row.chunk, i)

            dx, layers = lax.fori_loop(start, row.layers, layer, (dx, c.grads["llm"]["layers"]))
            c = c.with_grads(("llm", "layers"), layers).after(dx)

            def send(zero: jax.Array, c: Carry) -> Carry:
                return c._replace(wire=put(c.wire, dx, row.write + zero))

            def embed(zero: jax.Array, carry: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
                with jax.named_scope("embed"):
                    return carry[0], self._embed_backward(row.at(zero), *carry)

            c = when(row.first == 0, send, c)
            return when(row.first == 1, embed, (dx, c))[1]

    # The two ends of the LLM.

    def _embed(self, row: Row, c: Carry) -> Carry:
        tokens = self.batch["tokens"][row.microbatch]
        features, start = [], 0
        for own, pipe, lanes in zip(c.encoders, self.pipes, self.lanes, strict=True):
            slots = row.feature[start : start + pipe.units]
            start += pipe.units
            taken = jnp.stack([get(own.feature, slots[u]) for u in range(pipe.units)])
            # a microbatch without encoder work has no features: zero, as without images
            there = (slots >= 0)[:, None, None, None]
            features.append(self._all_lanes(jnp.where(there, taken, 0), lanes))
        x = self.model.embed_text(
            self.params["embed"], tokens, jnp.concatenate(features, axis=1), self.region
        )
        return c._replace(saved=put(c.saved, x, row.saved, 0))

    @staticmethod
    def _all_lanes(x: jax.Array, lanes: tuple[Axes, int]) -> jax.Array:
        """[units, unit rows, ...] of each lane, all together as the rows of a microbatch."""
        axes, count = lanes
        if count > 1:
            x = lax.all_gather(x, axes, axis=1)
        return x.reshape(-1, *x.shape[-2:])

    def _embed_backward(self, row: Row, dx: jax.Array, c: Carry) -> Carry:
        tokens = self.batch["tokens"][row.microbatch]
        rows, shapes = tokens.shape[0], [own.feature.shape[2:] for own in c.encoders]
        features = jnp.zeros((rows, sum(n for n, _ in shapes), shapes[0][1]), dx.dtype)
        _, vjp = jax.vjp(  # linear: any features will do
            lambda p, f: self.model.embed_text(p, tokens, f, self.region),
            self.params["embed"],
            features,
        )
        dp, df = vjp(dx)
        place = start = 0
        for k, (pipe, (axes, count)) in enumerate(zip(self.pipes, self.lanes, strict=True)):
            mine = df[:, place : place + shapes[k][0]]
            place += shapes[k][0]
            mine = mine.reshape(pipe.units, count, -1, *shapes[k])
            mine = mine[:, lax.axis_index(axes) if count > 1 else 0]
            feature = c.encoders[k].feature
            for u in range(pipe.units):
                feature = put(feature, mine[u], row.feature[start + u])
            start += pipe.units
            c = c.encoder(k, feature=feature)
        return c.add(("llm", "embed"), dp)

    def _head(self, row: Row, c: Carry) -> Carry:
        x = get(c.saved, row.saved, row.layers)
        targets, weights = (self.batch[k][row.microbatch] for k in ("targets", "weights"))

        def loss(p: Params, x: jax.Array) -> jax.Array:
            return self.model.summed_loss(p, x, targets, weights, self.region)

        total, vjp = jax.vjp(loss, self.params["head"], x)
        dp, dx = vjp(self.scale)
        c = c._replace(wire=put(c.wire, dx, row.write), loss=c.loss + total * self.scale)
        return c.add(("llm", "head"), dp).after(dx)

    # Layers.

    def layer(self, row: Row, i: jax.Array) -> Params:
        return jax.tree.map(lambda w: w[row.chunk, i], self.params["layers"])

    def save(self, c: Carry, row: Row, i: jax.Array, y: jax.Array, made: Recording) -> Carry:
        saved = put(c.saved, y, row.saved, i + 1)
        return c._replace(saved=saved, kept=keep(c.kept, made.saved, row.saved, i))

    def layer_vjp(
        self, row: Row, i: jax.Array, x: jax.Array, region: Region, dy: jax.Array
    ) -> tuple[Params, jax.Array]:
        def forward(p: Params, x: jax.Array) -> jax.Array:
            return self.model.llm_layer(p, x, region)

        dp, dx = jax.vjp(forward, self.layer(row, i), x)[1](dy)
        return dp, dx
