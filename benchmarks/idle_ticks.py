"""What an idle tick costs, with a small and a large carry.

    python benchmarks/idle_ticks.py

Compiles the executor twice, with the carry of a step near 1 MB and near 100 MB, runs Programs of
100 and of 20,100 idle ticks by turns, and prints a twentieth of the difference: 1,000 idle ticks.
So many, since filling 100 MB at the start of a step varies by more than 1,000 idle ticks take.
Medians and quartiles of the rounds, and the ratio of the medians.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import time

import jax
import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))

from optimus_jax.runtime import slots as slot_buffers
from optimus_jax.runtime.comparison import Bench
from optimus_jax.runtime.small_plan import SmallPlan
from optimus_jax.schedule.lower import lower
from optimus_jax.schedule.methods import schedule
from optimus_jax.schedule.program import EncoderSlots, Program, Slots

ROUNDS = 15
THOUSANDS = 20


def idle(program: Program, ticks: int) -> Program:
    """`ticks` ticks in which nothing runs and nothing moves."""
    row = np.broadcast_to(program.columns.idle_row(), (ticks, *program.table.shape[1:]))
    return dataclasses.replace(
        program, table=row.astype(np.int32), pattern=np.zeros(ticks, np.int32)
    )


def main() -> None:
    bench = Bench(SmallPlan(pp=2, dp=1, chunks=1, microbatches=4))
    durations = bench.plan.durations
    program = lower(schedule("filled", "1f1b", bench.pipe, durations), durations)
    runs = {}
    for slots in (40, 4700):
        encoder = EncoderSlots(feature=slots, saved=slots)
        program = dataclasses.replace(program, slots=Slots(slots, slots, (encoder,)))
        executor = bench.executor(program)
        params = bench.staged(executor, bench.params)
        carry = jax.tree.leaves(slot_buffers.shapes(executor, params))
        size = sum(x.dtype.itemsize * int(np.prod(x.shape)) for x in carry)
        batch, steps = executor.feed.batch(bench.batch), []
        for ticks in (100, 100 + 1000 * THOUSANDS):
            tables = executor.feed.tables(idle(program, ticks))
            compiled = executor.gradient_step().lower(params, batch, *tables).compile()
            jax.block_until_ready(compiled(params, batch, *tables))
            steps.append((compiled, (params, batch, *tables)))
        runs[slots] = size, steps
    seconds: dict[int, list[float]] = {slots: [] for slots in runs}
    for _ in range(ROUNDS):
        for slots, (_, steps) in runs.items():
            times = []
            for compiled, arguments in steps:
                start = time.perf_counter()
                jax.block_until_ready(compiled(*arguments))
                times.append(time.perf_counter() - start)
            seconds[slots].append((times[1] - times[0]) / THOUSANDS)
    medians = []
    for slots, (size, _) in runs.items():
        low, median, high = statistics.quantiles(seconds[slots], n=4)
        medians.append(median)
        print(
            f"carry {size / 1e6:6.1f} MB: 1,000 idle ticks {1e3 * median:6.2f} ms"
            f" (quartiles {1e3 * low:.2f} to {1e3 * high:.2f}, {ROUNDS} rounds)"
        )
    print(f"ratio {medians[1] / medians[0]:.2f}")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    main()
