"""A compiled training step that runs and times any Program of its shape."""

from __future__ import annotations

import time
from typing import Any

import jax
from jax.sharding import Mesh

from optimus_jax.config import Config
from optimus_jax.data.noise import random_batch
from optimus_jax.runtime.clock import Clock
from optimus_jax.runtime.executor import Executor
from optimus_jax.runtime.feed import Tables
from optimus_jax.runtime.trainer import Trainer
from optimus_jax.schedule.program import Program, Shape
from optimus_jax.schedule.simulate import Durations
from optimus_jax.schedule.task import Pipeline


class Session:
    """The training step of a configuration, compiled for Programs of one shape.

    Pictures, spectrograms and text are noise. `pipe` is another pipeline than the configuration's
    own, with the same model, batch and devices. With `emulate`, tasks are sleeps; with a `clock`,
    the step notes when its parts run.
    """

    def __init__(
        self,
        config: Config,
        shape: Shape,
        emulate: Durations | None = None,
        clock: Clock | None = None,
        pipe: Pipeline | None = None,
    ):
        self.config, self.shape, self.clock = config, shape, clock
        # seconds of a chunk's F
        self.emulated_forward = max(emulate.forward) if emulate else None
        self.executor = Executor.of(
            config, shape.slots, jax.devices(), pipe, emulate=emulate, clock=clock
        )
        trainer = Trainer(self.executor, config.train)
        self.state = trainer.init()
        self.batch = self.executor.feed.batch(random_batch(config.model, config.train.batch))
        self._step = trainer.train_step()

    @property
    def pipe(self) -> Pipeline:
        return self.executor.pipe

    @property
    def mesh(self) -> Mesh:
        return self.executor.meshes.mesh

    def fits(self, program: Program) -> bool:
        """Whether a Program can run here."""
        return program.pipeline == self.pipe and covering(self.shape, program.shape) == self.shape

    def place(self, program: Program) -> Tables:
        """The tables of a Program that fits, on the devices."""
        return self.executor.feed.tables(program.padded(*self.shape))

    def run(self, tables: Tables) -> dict[str, Any]:
        """One training step; its metrics, there when it is over."""
        self.state, metrics = self._step(self.state, self.batch, *tables)
        jax.block_until_ready((self.state, metrics))
        return metrics

    def seconds(self, tables: Tables, late: float = 0.0) -> float:
        """Seconds of one training step. The processes begin together, since each ends the step
        before with a sum over all of them, or each `late` seconds after the one before it."""
        start = time.perf_counter()
        if late:
            time.sleep(late * jax.process_index())
        self.run(tables)
        return time.perf_counter() - start


def covering(one: Shape, other: Shape) -> Shape:
    """The least shape that Programs of both fit."""
    return Shape(
        max(one.ticks, other.ticks),
        one.slots.covering(other.slots),
        max(one.prologue, other.prologue),
        max(one.epilogue, other.epilogue),
    )
