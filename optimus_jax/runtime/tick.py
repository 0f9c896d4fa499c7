"""One tick: the task that the row names, then one exchange over the links of a pattern."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from optimus_jax.parallel.mesh import Axes
from optimus_jax.runtime import buffers
from optimus_jax.runtime.carry import Carry, Row
from optimus_jax.runtime.clock import Clock
from optimus_jax.schedule.columns import columns_of
from optimus_jax.schedule.program import KINDS, Pattern, Payload, alphabet, payloads
from optimus_jax.schedule.task import Kind, Pipeline


class TasksOf(Protocol):
    """The tasks of one module: LlmTasks, EncoderTasks, or Sleeps in their place."""

    def forward(self, c: Carry, row: Row) -> Carry: ...

    def backward(self, c: Carry, row: Row) -> Carry: ...


@dataclasses.dataclass(frozen=True)
class Tick:
    """Without `llm`, only encoder tasks run. `poison` and `clock` as the executor's."""

    llm: TasksOf | None
    encoders: tuple[TasksOf, ...]
    pipe: Pipeline
    pipe_axes: Axes
    poison: bool = False
    clock: Clock | None = None

    def run(self, c: Carry, row: jax.Array, pattern: jax.Array) -> Carry:
        """The carry after a tick with this row of the table and this pattern."""
        c = self._note(self.tasks_only(self._note(c), row))
        return self._note(self._exchange(c, Row(row, columns_of(self.pipe)), pattern))

    def tasks_only(self, c: Carry, row: jax.Array) -> Carry:
        """The carry after the row's task, without an exchange."""
        named = Row(row, columns_of(self.pipe))

        def run(c: Carry, condition: jax.Array, task: Callable[[Carry, Row], Carry]) -> Carry:
            return buffers.when(condition, lambda zero, c: task(c, named.at(zero)), c)

        def encoder(c: Carry, kind: Kind) -> Carry:
            for k, tasks in enumerate(self.encoders):
                alone = (named.kind == 0) & (named.e_kind == KINDS[kind]) & (named.encoder == k)
                task = tasks.forward if kind == Kind.EF else tasks.backward
                c = run(c, alone, task)
            return c

        # readers of a buffer before its writers: F and EB read features, B and EF write them
        if self.llm is not None:
            c = run(c, named.kind == KINDS[Kind.F], self.llm.forward)
        c = encoder(c, Kind.EB)
        if self.llm is not None:
            c = run(c, named.kind == KINDS[Kind.B], self.llm.backward)
        return encoder(c, Kind.EF)

    def _note(self, c: Carry) -> Carry:
        return c if self.clock is None else self.clock.note(c, self.pipe_axes)

    def _exchange(self, c: Carry, row: Row, pattern: jax.Array) -> Carry:
        """Only the payload of one class passes through the switch over patterns."""
        every = alphabet(self.pipe)
        for payload in payloads(self.pipe):
            numbers = [k for k, p in enumerate(every) if p.links and p.payload == payload]
            if not numbers:
                continue
            first, last = numbers[0], numbers[-1]
            patterns = [every[k] for k in numbers]
            move = self._llm if payload.content == "llm" else self._encoder

            def exchange(
                zero: jax.Array,
                c: Carry,
                move: Callable[..., Carry] = move,
                payload: Payload = payload,
                patterns: list[Pattern] = patterns,
                first: int = first,
            ) -> Carry:
                return move(c, row, payload, patterns, pattern - first)

            c = buffers.when((pattern >= first) & (pattern <= last), exchange, c)
        return c

    def _llm(
        self, c: Carry, row: Row, _: Payload, patterns: list[Pattern], which: jax.Array
    ) -> Carry:
        value = self._move(patterns, which, buffers.get(c.wire, row.send))
        c = c._replace(wire=self._arrive(c.wire, value, row.receive))
        return c.after(jnp.where(row.receive < 0, 0, value))  # nothing came, or trash

    def _encoder(
        self, c: Carry, row: Row, payload: Payload, patterns: list[Pattern], which: jax.Array
    ) -> Carry:
        k, pool = payload.encoder, payload.content
        buffer, count = getattr(c.encoders[k], pool), self.pipe.encoders[k].units
        sent = jnp.stack([buffers.get(buffer, row.e_send[n]) for n in range(count)])
        values = self._move(patterns, which, sent)
        for n in range(count):
            buffer = self._arrive(buffer, values[n], row.e_receive[n])
        c = c.encoder(k, **{pool: buffer})
        return c.after(jnp.where(row.e_receive[0] < 0, 0, values[0]))

    def _move(self, patterns: list[Pattern], which: jax.Array, payload: jax.Array) -> jax.Array:
        branches = [
            lambda x, links=p.links: lax.ppermute(
                x, self.pipe_axes, [pair for a, b in sorted(links) for pair in ((a, b), (b, a))]
            )
            for p in patterns
        ]
        return lax.switch(which, branches, payload)

    def _arrive(self, buffer: jax.Array, value: jax.Array, slot: jax.Array) -> jax.Array:
        if self.poison:
            value = jnp.where(slot < 0, jnp.nan, value)
        return buffers.put(buffer, value, slot)
