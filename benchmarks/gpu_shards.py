"""One layer of GPT-175B and of ViT-22B as a tensor shard: each kernel and the whole, timed alone
on one device, beside what cost/kernels.py predicts of them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from gpu_kernels import Run, Shard, full, kernels, layer

from optimus_jax.cost.hardware import HARDWARE
from optimus_jax.cost.kernels import LayerKernels, layer_kernels
from optimus_jax.cost.transformer import MODELS, Transformer
from optimus_jax.measure.rounds import by_turns
from optimus_jax.runtime.compilation import quick_compile

# microbatches of 2 sequences; 8 pictures of 256 patches
FULL = Shard(MODELS["GPT-175B"], 2, 2048, 8), Shard(MODELS["ViT-22B"], 8, 256, 8)
SMALL = (
    Shard(Transformer("GPT, width 64", 1, 64, 4, 256, causal=True), 2, 16, 2),
    Shard(
        Transformer("ViT-22B, width 64", 1, 64, 4, 256, parallel_block=True, qk_norm=True), 2, 16, 2
    ),
)
CHIPS = "h100", "h200"  # of which the planner's table is to be judged
COMPILING = 95.0  # seconds for all compilations; rounds take a few more
TIMING, TRIPS = 5e-3, (8, 200)  # seconds that a loop should take, and the bounds of its trips
# Only cuBLAS for the kernels alone: XLA else compiles dozens of its own products for each of them.
FAST = {"xla_gpu_enable_triton_gemm": False}


def predicted(shard: Shard, chip: str, dtype: str) -> LayerKernels:
    return layer_kernels(shard.model, shard.rows, shard.length, shard.tp, HARDWARE[chip], dtype)


def entries(found: LayerKernels) -> dict[tuple[str, str], tuple[float, float]]:
    """By pass and kernel that computes: operations and seconds. The whole layer is `layer`, its
    pass `both` a forward and a backward."""
    out, total = {}, {}
    for name in ("forward", "backward"):
        own = [k for k in getattr(found, name) if not k.is_communication]
        out |= {(name, k.name): (k.flops, k.seconds) for k in own}
        total[name] = sum(k.flops for k in own), sum(k.seconds for k in own)
    out["forward", "layer"] = total["forward"]
    out["both", "layer"] = tuple(map(sum, zip(*total.values(), strict=True)))
    return out


class Timer:
    """A loop of kernels, compiled; `seconds` are those of one trip."""

    def __init__(self, run: Run, expected: float, options: dict[str, Any]):
        low, high = TRIPS
        self.operands, self.trips = run.operands, min(max(low, int(TIMING / expected)), high)
        made = jax.jit(run.loop(self.trips), compiler_options=options)
        self.loop = made.lower(*self.operands).compile()

    def seconds(self) -> float:
        start = time.perf_counter()
        jax.block_until_ready(self.loop(*self.operands))
        return (time.perf_counter() - start) / self.trips


def nothing() -> Run:
    """What is in every other figure: one trip, and the number that it hands on."""
    return Run(lambda x: x[:1], (full(1, 128),))


def measure(
    shards: tuple[Shard, ...],
    cores: tuple[str, ...],
    dtype: str,
    chip: str,
    rounds: int,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Of each shard: seconds of a trip by round for each kernel and for the whole layer, with its
    operations, the seconds predicted for `chip` and CHIPS, and predicted / measured medians.

    `left_out` says of kernels that were not timed why. `peak_bytes` is the most memory that jax has
    held on the device so far, None where it does not say.
    """
    until, small = time.monotonic() + COMPILING, jax.default_backend() == "cpu"
    options = quick_compile() if small else {}
    found = []
    for shard in shards:
        say(f"{shard.model.name}: compiling kernels")
        counted = {c: entries(predicted(shard, c, dtype)) for c in {chip, *CHIPS}}
        wanted: list[tuple[str, str, str, Callable[[], Run], dict[str, Any]]] = [
            *((*which, options if small else FAST) for which in kernels(shard, cores, dtype)),
            *(
                (way, "layer", core, partial(layer, shard, core, dtype, way == "both"), options)
                for way, core in (("forward", cores[0]), *(("both", core) for core in cores))
            ),
        ]
        timers = {("", "nothing", ""): Timer(nothing(), 1e-6, options)}
        left_out: dict[str, str] = {}
        for way, name, core, make, how in wanted:
            words = " ".join(filter(None, (way, name, core)))
            if time.monotonic() > until:
                left_out[words] = f"not compiled within {COMPILING:.0f} s"
                continue
            try:
                timers[way, name, core] = Timer(make(), counted[chip][way, name][1], how)
            except Exception as error:  # the other kernels are still wanted
                left_out[words] = f"{type(error).__name__}: {error}".splitlines()[0]
        say(f"{shard.model.name}: {rounds} rounds of {len(timers)} loops")
        times = by_turns({str(k): timer.seconds for k, timer in timers.items()}, rounds)
        loop = times[str(("", "nothing", ""))]
        rows = []
        for (way, name, core), timer in timers.items():
            if not way:
                continue
            seconds = times[str((way, name, core))]
            expected = {c: counted[c][way, name][1] for c in counted}
            rows.append(
                {
                    "pass": way,
                    "kernel": name,
                    "core": core,
                    "flops": counted[chip][way, name][0],
                    "trips": timer.trips,
                    "seconds": seconds,
                    "predicted_s": expected,
                    "ratio": expected[chip] / statistics.median(seconds),
                }
            )
        found.append(
            {
                "model": shard.model.name,
                "rows": shard.rows,
                "length": shard.length,
                "tp": shard.tp,
                "dtype": dtype,
                "chip": chip,
                "loop_s": loop,
                "kernels": rows,
                "left_out": left_out,
                "peak_bytes": (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
            }
        )
    return found


def profile(found: list[dict[str, Any]]) -> dict[tuple[str, str, str], float]:
    """What the planner reads (cost/kernels.py): medians by model, pass and kernel, attention by the
    first core; what a full recompute runs takes a forward's seconds."""
    seconds: dict[tuple[str, str, str], float] = {}
    for one in found:
        for row in one["kernels"]:
            if row["kernel"] == "layer":
                continue
            median = statistics.median(row["seconds"])
            assert math.isfinite(median)
            seconds.setdefault((one["model"], row["pass"], row["kernel"]), median)
            if row["pass"] == "forward":
                seconds.setdefault((one["model"], "recompute", row["kernel"]), median)
    return seconds
