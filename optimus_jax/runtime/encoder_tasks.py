"""What an encoder's tasks compute: forward and backward of a stage's layers for some units.

A forward writes the input of each layer into its slot; a backward is a reverse loop that takes the
vjp of one layer at its saved input and hands the gradient down. Any range of layers thus needs one
compilation, and nothing is differentiated through a loop.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from optimus_jax.models.mllm import Mllm
from optimus_jax.models.region import Kept, Recording, Region
from optimus_jax.models.weights import Params
from optimus_jax.runtime.buffers import add_at, get, keep, kept_at, put, when
from optimus_jax.runtime.carry import Carry, Row
from optimus_jax.runtime.pairing import Piece, backward_pieces, gradients_of


@dataclasses.dataclass(frozen=True)
class EncoderTasks:
    """The tasks of one device for encoder number `number`.

    `params` are its shards in the compute dtype, layers [layers of the stage, ...]; `inputs` its
    replica's pictures or spectrograms [M, units, lanes, unit rows, ...], of which it takes those of
    its `lane`; `names` the activations that a backward does not compute again.
    """

    model: Mllm
    number: int
    name: str
    params: Params
    inputs: jax.Array
    lane: jax.Array | int
    region: Region
    names: tuple[str, ...] = ()

    # Each task: (carry, row) -> carry, run when the row names its kind and this encoder.

    def forward(self, c: Carry, row: Row) -> Carry:
        """EF: layers [begin, end) of each named unit; the patch embedding before the first layer,
        the projector after the last."""

        def unit(n: jax.Array, c: Carry) -> Carry:
            def layer(i: jax.Array, c: Carry) -> Carry:
                x = get(c.encoders[self.number].saved, row.e_saved[n], i)
                region = Recording(self.region, self.names)
                y = self.model.encoder_layer(self.name, self.layer(i), x, region)
                return self.save(c, row.e_saved[n], i, y, region.saved)

            c = self.begin_forward(c, row, n)
            c = lax.fori_loop(row.begin, row.end, layer, c)
            return self.finish_forward(c, row, n)

        with jax.named_scope("encoder"):
            return lax.fori_loop(0, row["count"], unit, c)

    def backward(self, c: Carry, row: Row) -> Carry:
        """EB: the same in reverse. Between two ranges of a unit the gradient waits in the place of
        the layer input that it belongs to."""

        def unit(n: jax.Array, c: Carry) -> Carry:
            def layer(j: jax.Array, carry: tuple[jax.Array, Params]) -> tuple[jax.Array, Params]:
                dy, grads = carry
                i = row.end - 1 - j
                x, region = self.saved(c, row.e_saved[n], i)

                def forward(p: Params, x: jax.Array) -> jax.Array:
                    return self.model.encoder_layer(self.name, p, x, region)

                dp, dx = jax.vjp(forward, self.layer(i), x)[1](dy)
                return dx, add_at(grads, dp, i)

            c, dy = self.begin_backward(c, row, n)
            stack = c.grads["encoders"][self.name]["layers"]
            dx, stack = lax.fori_loop(0, row.end - row.begin, layer, (dy, stack))
            c = c.with_grads(("encoders", self.name, "layers"), stack)
            return self.finish_backward(c, row, n, dx)

        with jax.named_scope("encoder"):
            return lax.fori_loop(0, row["count"], unit, c)

    # The parts of a task around its layers.

    def begin_forward(self, c: Carry, row: Row, n: jax.Array | int) -> Carry:
        """The first layer's input of the n-th unit, where the task starts at the stage's first."""
        k, slot = self.number, row.e_saved[n]

        def embed(zero: jax.Array, saved: jax.Array) -> jax.Array:
            part = self.params["embed"]
            x = self.model.embed_input(self.name, part, self._inputs(row, n, zero), self.region)
            return put(saved, x, slot, 0)

        def receive(zero: jax.Array, saved: jax.Array) -> jax.Array:
            return put(saved, get(c.encoders[k].hidden, row.e_read[n] + zero), slot, 0)

        saved = when(row.embeds == 1, embed, c.encoders[k].saved)
        if self._has_stages(c):
            saved = when((row.embeds == 0) & (row.e_read[n] >= 0), receive, saved)
        return c.encoder(k, saved=saved)

    def finish_forward(self, c: Carry, row: Row, n: jax.Array | int) -> Carry:
        """What goes on from the n-th unit's last layer of the task."""
        k, slot = self.number, row.e_saved[n]

        def project(zero: jax.Array, c: Carry) -> Carry:
            x = get(c.encoders[k].saved, slot + zero, row.end)
            y = self.model.project(self.name, self.params["projector"], x, self.region)
            return c.encoder(k, feature=put(c.encoders[k].feature, y, row.e_write[n]))

        def send(zero: jax.Array, c: Carry) -> Carry:
            y = get(c.encoders[k].saved, slot + zero, row.end)
            return c.encoder(k, hidden=put(c.encoders[k].hidden, y, row.e_write[n]))

        c = c.after(get(c.encoders[k].saved, slot, row.end))
        if self._has_stages(c):
            c = when((row.projects == 0) & (row.e_write[n] >= 0), send, c)
        return when(row.projects == 1, project, c)

    def begin_backward(self, c: Carry, row: Row, n: jax.Array | int) -> tuple[Carry, jax.Array]:
        """The carry, and the gradient of the output of the task's last layer of the n-th unit."""
        k, slot = self.number, row.e_saved[n]
        path = ("encoders", self.name, "projector")

        def project(zero: jax.Array, carry: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
            c = carry[1]
            x = get(c.encoders[k].saved, slot + zero, row.end)

            def forward(p: Params, x: jax.Array) -> jax.Array:
                return self.model.project(self.name, p, x, self.region)

            _, vjp = jax.vjp(forward, self.params["projector"], x)
            dp, dx = vjp(get(c.encoders[k].feature, row.e_read[n] + zero))
            return dx, c.add(path, dp)

        dy = get(c.encoders[k].saved, slot, row.end)
        if self._has_stages(c):
            came = get(c.encoders[k].hidden, row.e_read[n])
            dy = jnp.where((row.projects == 0) & (row.e_read[n] >= 0), came, dy)
        dy, c = when(row.projects == 1, project, (dy, c))
        return c, dy

    def finish_backward(self, c: Carry, row: Row, n: jax.Array | int, dx: jax.Array) -> Carry:
        """Where the gradient of the input of the task's first layer goes."""
        k, slot = self.number, row.e_saved[n]

        def embed(zero: jax.Array, c: Carry) -> Carry:
            def forward(p: Params) -> jax.Array:
                return self.model.embed_input(self.name, p, self._inputs(row, n, zero), self.region)

            _, vjp = jax.vjp(forward, self.params["embed"])
            return c.add(("encoders", self.name, "embed"), vjp(dx)[0])

        def wait(zero: jax.Array, c: Carry) -> Carry:
            return c.encoder(k, saved=put(c.encoders[k].saved, dx, slot + zero, row.begin))

        def send(zero: jax.Array, c: Carry) -> Carry:
            return c.encoder(k, hidden=put(c.encoders[k].hidden, dx, row.e_write[n] + zero))

        c = when(row.begin > 0, wait, c.after(dx))
        if self._has_stages(c):
            c = when((row.embeds == 0) & (row.e_write[n] >= 0), send, c)
        return when(row.embeds == 1, embed, c)

    # One layer.

    def layer(self, i: jax.Array) -> Params:
        """The weights of layer i of the stage."""
        return jax.tree.map(lambda w: w[i], self.params["layers"])

    def save(self, c: Carry, slot: jax.Array, i: jax.Array, y: jax.Array, kept: Any) -> Carry:
        """The carry with layer i's output and what its backward is to find."""
        own = c.encoders[self.number]
        saved = put(own.saved, y, slot, i + 1)
        return c.encoder(self.number, saved=saved, kept=keep(own.kept, kept, slot, i))

    def saved(self, c: Carry, slot: jax.Array, i: jax.Array) -> tuple[jax.Array, Region]:
        """Layer i's input, and the region that its backward computes in."""
        own = c.encoders[self.number]
        return get(own.saved, slot, i), Kept(self.region, kept_at(own.kept, slot, i))

    def forward_pieces(self, i: jax.Array, region: Region) -> list[Piece]:
        """Layer i's forward in pieces, which hand on the state that starts as (x,)."""
        p = self.layer(i)
        return [_scoped(functools.partial(piece, p)) for piece in self._bound(region)]

    def backward_pieces(self, i: jax.Array, region: Region) -> tuple[list[Piece], Params]:
        """Layer i's backward in pieces (see pairing.backward_pieces), and its weights."""
        p = self.layer(i)
        return [_scoped(piece) for piece in backward_pieces(self._bound(region), p)], p

    def _bound(self, region: Region) -> list[Callable[[Params, Any], Any]]:
        """A layer's pieces in this region."""
        pieces = self.model.encoder_pieces(self.name)
        return [lambda p, state, piece=piece: piece(p, state, region) for piece in pieces]

    def add_layer(self, c: Carry, grads: dict[int, jax.Array], p: Params, i: jax.Array) -> Carry:
        """The carry with the gradients of layer i added, as backward pieces gathered them."""
        path = ("encoders", self.name, "layers")
        stack = c.grads["encoders"][self.name]["layers"]
        return c.with_grads(path, add_at(stack, gradients_of(grads, p), i))

    def _inputs(self, row: Row, n: jax.Array | int, zero: jax.Array) -> jax.Array:
        return self.inputs[row.e_microbatch + zero, row.unit[n], self.lane]

    def _has_stages(self, c: Carry) -> bool:
        """Whether the encoder has several stages, so that its hidden states move."""
        return c.encoders[self.number].hidden.shape[0] > 1


def _scoped(piece: Piece) -> Piece:
    """The same piece, named as the encoder's in the compiled step."""

    def run(state: Any) -> Any:
        with jax.named_scope("encoder"):
            return piece(state)

    return run
