"""LLM layers with encoder layers beside them: what a fused task has more than an LLM task.

An encoder layer runs in the same loop body as an LLM layer, its pieces beside the LLM's
tensor-parallel collectives (runtime/pairing.py).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from optimus_jax.models.region import Kept, Recording
from optimus_jax.models.weights import Params
from optimus_jax.parallel.tensor import TensorRegion
from optimus_jax.runtime.buffers import add_at, get, kept_at, when
from optimus_jax.runtime.carry import Carry, Row
from optimus_jax.runtime.encoder_tasks import EncoderTasks
from optimus_jax.runtime.pairing import Counting, PairedRegion
from optimus_jax.schedule.program import KINDS
from optimus_jax.schedule.task import Kind

if TYPE_CHECKING:
    from optimus_jax.runtime.llm_tasks import LlmTasks


@dataclasses.dataclass(frozen=True)
class FusedLayers:
    """The layers of an encoder inside the LLM's tasks of one device."""

    llm: LlmTasks
    encoder: EncoderTasks

    def forward(self, c: Carry, row: Row, start: int | jax.Array) -> tuple[int | jax.Array, Carry]:
        """As many LLM layers as the encoder task inside has layers, each with one of them; the
        number of LLM layers done, and the carry."""
        llm, encoder = self.llm, self.encoder
        here = (row.e_kind == KINDS[Kind.EF]) & (row.encoder == encoder.number)
        count = jnp.where(here, row.end - row.begin, 0)
        slot = row.e_saved[0]

        def both(j: jax.Array, c: Carry) -> Carry:
            i, n = start + j, row.begin + j
            inner = Recording(encoder.region, encoder.names)
            paired = PairedRegion(
                self._tensor,
                encoder.forward_pieces(n, inner),
                (get(c.encoders[encoder.number].saved, slot, n),),
                [True] * self._windows[0],
                llm.tied,
                forward_only=True,
            )
            made = Recording(paired, llm.names)
            y = llm.model.llm_layer(llm.layer(row, i), get(c.saved, row.saved, i), made)
            (z,) = paired.finish()
            return encoder.save(llm.save(c, row, i, y, made), slot, n, z, inner.saved)

        def begin(zero: jax.Array, c: Carry) -> Carry:
            return encoder.begin_forward(c, row.at(zero), 0)

        def finish(zero: jax.Array, c: Carry) -> Carry:
            return encoder.finish_forward(c, row.at(zero), 0)

        with jax.named_scope("encoder"):
            c = when(here, begin, c)
        c = lax.fori_loop(0, count, both, c)
        with jax.named_scope("encoder"):
            c = when(here, finish, c)
        return start + count, c

    def backward(
        self, c: Carry, row: Row, start: jax.Array, dx: jax.Array
    ) -> tuple[jax.Array, jax.Array, Carry]:
        """The same in reverse; also the gradient of the last LLM layer's input."""
        llm, encoder = self.llm, self.encoder
        here = (row.e_kind == KINDS[Kind.EB]) & (row.encoder == encoder.number)
        count = jnp.where(here, row.end - row.begin, 0)
        slot, path = row.e_saved[0], ("llm", "layers")
        Pair = tuple[jax.Array, jax.Array, Carry]

        def both(j: jax.Array, carry: Pair) -> Pair:
            dy, dz, c = carry
            i, n = row.layers - 1 - start - j, row.end - 1 - j
            z, inner = encoder.saved(c, slot, n)
            pieces, p = encoder.backward_pieces(n, inner)
            x, kept = get(c.saved, row.saved, i), kept_at(c.kept, row.saved, i)
            forward, every = self._windows
            # To go back through a layer the sum that ends it is not needed, nor are others where
            # their results were saved. Gathers, which come first, third and so on, were not.
            gathers = self._tensor.sequence
            again = [not llm.names or (gathers and k % 2 == 0) for k in range(forward - 1)]
            windows = [*again, False] + [True] * (every - forward)
            paired = PairedRegion(self._tensor, pieces, ((z,), (dz,), {}), windows, llm.tied)
            dp, dx = llm.layer_vjp(row, i, x, Kept(paired, kept), dy)
            _, (dz,), grads = paired.finish()
            c = c.with_grads(path, add_at(c.grads["llm"]["layers"], dp, row.chunk, i))
            return dx, dz, encoder.add_layer(c, grads, p, n)

        def begin(zero: jax.Array, carry: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
            c, dz = encoder.begin_backward(carry[1], row.at(zero), 0)
            return dz, c

        def finish(zero: jax.Array, carry: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
            return carry[0], encoder.finish_backward(carry[1], row.at(zero), 0, carry[0])

        blank = jnp.zeros_like(get(c.encoders[encoder.number].saved, slot, 0))
        with jax.named_scope("encoder"):
            dz, c = when(here, begin, (blank, c))
        dx, dz, c = lax.fori_loop(0, count, both, (dx, dz, c))
        with jax.named_scope("encoder"):
            _, c = when(here, finish, (dz, c))
        return start + count, dx, c

    @property
    def _tensor(self) -> TensorRegion:
        region = self.llm.region
        if not isinstance(region, TensorRegion):
            raise ValueError("fused tasks need a tensor-parallel LLM")
        return region

    @functools.cached_property
    def _windows(self) -> tuple[int, int]:
        """Collectives of one LLM layer's forward, and of its forward and backward."""
        t, llm = self._tensor, self.llm
        _, rows, positions = llm.batch["tokens"].shape
        own = positions // t.size if t.sequence else positions
        config = llm.model.config
        p = jax.tree.map(lambda w: w[0, 0], llm.params["layers"])
        x = jax.ShapeDtypeStruct((rows, own, config.llm.width), config.dtype)
        once = Counting(t.axes, t.size, t.sequence, forward_only=True)
        jax.eval_shape(lambda p, x: llm.model.llm_layer(p, x, once), p, x)
        both = Counting(t.axes, t.size, t.sequence)

        def there_and_back(p: Params, x: jax.Array) -> tuple[Params, jax.Array]:
            y, vjp = jax.vjp(lambda p, x: llm.model.llm_layer(p, x, both), p, x)
            dp, dx = vjp(y)
            return dp, dx

        jax.eval_shape(there_and_back, p, x)
        return once.count, both.count
