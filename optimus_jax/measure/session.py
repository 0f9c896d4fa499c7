"""A compiled training step that runs and times any Program of its shape."""

from __future__ import annotations

import time
from typing import Any

import jax
from jax.sharding import Mesh

from optimus_jax.config import Config
from optimus_jax.data.noise import random_batch
from optimus_jax.models.mllm import Mllm
from optimus_jax.parallel.mesh import Grid, make_meshes
from optimus_jax.runtime.clock import Clock
from optimus_jax.runtime.executor import Executor
from optimus_jax.runtime.trainer import Trainer
from optimus_jax.schedule.program import Program, Slots
from optimus_jax.schedule.simulate import Durations

Tables = tuple[jax.Array, jax.Array]


class Session:
    """The training step of a configuration with `slots`, compiled for Programs of `ticks` ticks.

    Pictures and text are noise. With `emulate`, tasks are sleeps; with a `clock`, the step notes
    when its parts run.
    """

    def __init__(
        self,
        config: Config,
        slots: Slots,
        ticks: int,
        emulate: Durations | None = None,
        clock: Clock | None = None,
    ):
        self.config, self.slots, self.ticks, self.clock = config, slots, ticks, clock
        self.emulated_forward = emulate.forward[0] if emulate else None  # seconds of a chunk's F
        meshes = make_meshes(Grid(config.parallel.dp, config.parallel.pp), jax.devices())
        self.executor = Executor(
            Mllm(config.model),
            config.pipeline,
            meshes,
            slots,
            config.microbatch_rows,
            emulate=emulate,
            clock=clock,
        )
        trainer = Trainer(self.executor, config.train)
        self.state = trainer.init()
        self.batch = self.executor.place_batch(random_batch(config.model, config.train.batch))
        self._step = trainer.train_step()

    @property
    def mesh(self) -> Mesh:
        return self.executor.meshes.grid

    def fits(self, program: Program) -> bool:
        """Whether a Program can run here."""
        return program.ticks <= self.ticks and self.slots.covering(program.slots) == self.slots

    def place(self, program: Program) -> Tables:
        """The tables of a Program that fits, on the devices."""
        return self.executor.place_tables(program.padded(self.ticks, self.slots))

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
