"""Predicted bytes of a training step beside XLA's own, and what 64 microbatches cost beside 8.

    python benchmarks/memory.py [--plan=NAME] [--table] [--rounds=N] [--json=FILE]

Each plan is traced from shapes, its memory table is made (runtime/memory.py), then the step is
compiled for CPU devices that hold nothing and asked for its memory_analysis(). Last the same plan
with a cap on encoder microbatches in flight is compiled for 8 and for 64 microbatches: seconds of
the compiler in N rounds by turns, characters and instructions of the HLO, bytes of encoder
activations.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import sys
import time
from typing import Any

import jax

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))

from optimus_jax.config import (
    Config,
    DataConfig,
    EncoderConfig,
    EncoderParallel,
    LlmConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
)
from optimus_jax.runtime.abstract_step import traced_step
from optimus_jax.runtime.memory import MemoryTable, measured_bytes, memory_table
from optimus_jax.schedule.lower import lower
from optimus_jax.schedule.methods import schedule
from optimus_jax.schedule.simulate import Durations

DEVICES = 8


def config(
    microbatches: int = 4,
    rows: int = 8,
    layers: int = 4,
    block: str = "gpt",
    encoder_block: str = "vit",
    dtype: str = "float32",
    encoder: EncoderParallel | None = None,
    dp: int = 1,
    pp: int = 2,
    chunks: int = 1,
    method: str = "filled",
    **parallel: Any,
) -> Config:
    """A plan of a model of some 10 million weights, with microbatches of `rows` rows."""
    model = ModelConfig(
        dtype=dtype,
        image_height=64,
        image_width=64,
        text_length=64,
        encoder=EncoderConfig(4, 192, 4, 768, 8, block=encoder_block),
        projector_hidden=320,
        llm=LlmConfig(layers, 256, 4, 1024, block=block),
        vocabulary=512,
    )
    plan = ParallelConfig(
        dp,
        pp,
        chunks,
        microbatches,
        "1f1b",
        method,
        encoder=encoder or EncoderParallel(),
        **parallel,
    )
    train = TrainConfig(0, rows * microbatches * dp, 100, 1e-4, 10, 0.1, 1.0, 10, 100, 1)
    return Config("cpu_core", model, DataConfig("digits"), plan, train, 8)


PLANS = {
    "pp2": config(),
    "pp2 dp2, ZeRO": config(dp=2),
    "pp2 dp2, no ZeRO": config(dp=2, zero=False),
    "pp2 dp2 tp2": config(dp=2, tp=2, encoder=EncoderParallel(tp=2)),
    "pp2 tp2, fused tasks": config(tp=2, fuse=True),
    "pp2, nothing recomputed": config(recompute="none", encoder=EncoderParallel(recompute="none")),
    "pp2, llama, selective": config(
        block="llama", recompute="selective", encoder=EncoderParallel(recompute="selective")
    ),
    "pp2 V2, phased": config(chunks=2, layers=8, method="phased"),
    "pp4, encoder pp2, M8": config(pp=4, microbatches=8, encoder=EncoderParallel(pp=2)),
    "pp4 dp2, encoder pp4 selective, M8": config(
        pp=4, dp=2, microbatches=8, encoder=EncoderParallel(pp=4, recompute="selective")
    ),
    "pp2, vit22b": config(encoder_block="vit22b"),
    "pp2 dp2, 2 rows, 8 layers": config(dp=2, rows=2, layers=8, microbatches=2),
    "pp2 dp2, bfloat16": config(dp=2, dtype="bfloat16"),
    "pp2 dp2, bfloat16 gradients too": config(dp=2, dtype="bfloat16", gradients="bfloat16"),
    "pp2 M8, cap 2": config(microbatches=8, encoder_cap=2),
    "pp2 M64, cap 2": config(microbatches=64, encoder_cap=2),
}
FEW, MANY = "pp2 M8, cap 2", "pp2 M64, cap 2"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Bytes, seconds of XLA's compiler, and the size of the compiled HLO."""

    table: MemoryTable
    measured: int
    seconds: float
    characters: int
    instructions: int

    @property
    def error(self) -> float:
        return self.table.total / self.measured - 1


def measure(config: Config) -> Outcome:
    durations = Durations.uniform(config.pipeline, encoder=0.5)
    if config.parallel.fuse:
        durations = dataclasses.replace(durations, window=(0.05, 0.1))
    p = config.parallel
    program = lower(schedule(p.method, p.order, config.pipeline, durations), durations)
    executor, traced = traced_step(config, program, jax.devices())
    table, lowered = memory_table(executor, traced), traced.lower()
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds, hlo = time.perf_counter() - start, compiled.as_text()
    return Outcome(table, measured_bytes(compiled)["total"], seconds, len(hlo), hlo.count(" = "))


def values(found: dict[str, Outcome]) -> dict[str, Any]:
    """As JSON."""
    return {
        name: {
            "predicted": x.table.total,
            "measured": x.measured,
            "error": x.error,
            "compile_s": x.seconds,
            "hlo_characters": x.characters,
            "hlo_instructions": x.instructions,
            "encoder_activations": x.table.activations("vision"),
        }
        for name, x in found.items()
    }


def compare(few: Outcome, many: Outcome) -> str:
    rows = [
        ("compile s", few.seconds, many.seconds),
        ("HLO characters", few.characters, many.characters),
        ("HLO instructions", few.instructions, many.instructions),
        (
            "encoder activations MB",
            few.table.activations("vision") / 1e6,
            many.table.activations("vision") / 1e6,
        ),
    ]
    lines = [f"{'':24}{'M 8':>12}{'M 64':>12}{'ratio':>8}"]
    lines += [f"{name:24}{a:12.6g}{b:12.6g}{b / a:8.3f}" for name, a, b in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--plan", action="append", choices=PLANS, help="these plans only")
    parser.add_argument("--table", action="store_true", help="print each plan's memory table")
    parser.add_argument("--rounds", type=int, default=1, help="compilations of the last two")
    parser.add_argument("--json", default="", help="write the figures to this file")
    asked = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    found: dict[str, Outcome] = {}
    print(f"{'MB on one device':36}{'predicted':>10}{'XLA':>10}{'error':>8}")
    for name in asked.plan or PLANS:
        x = found[name] = measure(PLANS[name])
        print(f"{name:36}{x.table.total / 1e6:10.1f}{x.measured / 1e6:10.1f}{x.error:+8.1%}")
        if asked.table:
            print(x.table)
    if FEW in found and MANY in found:
        print(compare(found[FEW], found[MANY]))
        rounds = [[found[name].seconds for name in (FEW, MANY)]]
        for _ in range(asked.rounds - 1):
            rounds.append([measure(PLANS[name]).seconds for name in (FEW, MANY)])
        ratios = sorted(many / few for few, many in rounds)
        few, many = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(
            f"compile s in {len(rounds)} rounds by turns: medians {few:.2f} and {many:.2f}, ratio"
            f" in a round {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        )
    if asked.json:
        pathlib.Path(asked.json).write_text(json.dumps(values(found), indent=1) + "\n")


if __name__ == "__main__":
    main()
