"""What one GPU does with the blocks, the tick loop and the step; see docs/gpu.md.

    python benchmarks/gpu.py                 one H200: under 8 minutes
    python benchmarks/gpu.py --small         any machine, only to see that it runs

Parts, by their names in --parts: `loops`, the trip counts that the host reads at every tick;
`step`, the tasks of one pipeline stage, and whole steps of the executor against the same model
under plain jit; `blocks`, transformer blocks here and in PyTorch by turns; `default`, whole steps
of configs/digits.py; `shards`, kernels of GPT-175B and ViT-22B beside the planner's. Prints tables
and, after every part and block, writes all figures so far to --out. What fails is written down with
what it said, and the rest runs; what there is no time for (--limit) likewise. The exit code is then
1.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import pathlib
import platform
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any

# PyTorch needs a share of the memory; jax reads this when it first meets the GPU, and raises where
# both its names are set
if not os.environ.keys() & {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"}:
    os.environ["XLA_CLIENT_MEM_FRACTION"] = "0.65"
sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))

import gpu_default
import gpu_loops
import gpu_report
import gpu_shards
import gpu_step
import jax
import numpy as np
from gpu_blocks import Case, JaxBlock, init

from optimus_jax.config import EncoderConfig, LlmConfig
from optimus_jax.cost.kernels import save_profile
from optimus_jax.measure.rounds import by_turns

PARTS = "loops", "step", "blocks", "default", "shards"
# seconds of a part, or of a block's system
NEEDED = {"loops": 45.0, "step": 150.0, "blocks": 40.0, "default": 60.0, "shards": 115.0}
ROUNDS = 30.0  # and of all its rounds
PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "numpy",
    "torch",
    "triton",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is run. A timing of a block is of `iterations` in a row. `agree` is the largest
    difference between the results of two systems, relative and in norms, that rounding explains.
    """

    cases: tuple[Case, ...]
    dtype: str
    cores: tuple[str, ...]
    torch_cores: tuple[str, ...]
    compiler: str
    agree: float
    iterations: int
    rounds: int
    ticks: int


GPT = LlmConfig(layers=1, width=4096, heads=32, hidden=16384)
LLAMA = LlmConfig(layers=1, width=4096, heads=32, hidden=14336, block="llama", kv_heads=8)
VIT = EncoderConfig(layers=1, width=6144, heads=48, hidden=24576, patch=14, block="vit22b")
FULL = Sizes(
    cases=(
        Case("GPT, width 4096", GPT, 4, 2048),
        Case("LLaMA, width 4096", LLAMA, 2, 4096),
        Case("ViT-22B, width 6144", VIT, 32, 256),
    ),
    dtype="bfloat16",
    cores=("cudnn", "plain"),
    torch_cores=("flash", "cudnn"),
    compiler="inductor",
    agree=0.03,
    iterations=5,
    rounds=20,
    ticks=1000,
)
GPT_64 = LlmConfig(layers=1, width=64, heads=4, hidden=256)
LLAMA_64 = LlmConfig(layers=1, width=64, heads=4, hidden=192, block="llama", kv_heads=2)
VIT_64 = EncoderConfig(layers=1, width=64, heads=4, hidden=256, patch=14, block="vit22b")
SMALL = Sizes(
    cases=(
        Case("GPT, width 64", GPT_64, 2, 24),
        Case("LLaMA, width 64", LLAMA_64, 2, 24),
        Case("ViT-22B, width 64", VIT_64, 2, 16),
    ),
    dtype="float32",
    cores=("xla", "plain"),
    torch_cores=("flash", "math"),
    compiler="aot_eager",  # the C++ that inductor writes for a CPU takes minutes to compile
    agree=1e-5,
    iterations=1,
    rounds=3,
    ticks=50,
)


class Run:
    """The figures so far, what failed, and the time left."""

    def __init__(self, out: pathlib.Path, limit: float):
        self.out, self.end = out, time.monotonic() + limit
        self.figures: dict[str, Any] = {"where": where()}
        self.failed: dict[str, str] = {}

    def attempt(self, name: str, function: Callable[[], Any], needed: float = 0.0) -> Any:
        """What the function gives, or None if it fails or less than `needed` seconds are left."""
        left = self.end - time.monotonic()
        if left < needed:
            self.failed[name] = f"{left:.0f} s left, it may need {needed:.0f}"
            return None
        print(f"[{left:4.0f} s left] {name}", flush=True)
        try:
            return function()
        except Exception as error:  # time on the machine is short: the rest is still wanted
            self.failed[name] = traceback.format_exc()
            print(f"failed: {type(error).__name__}: {error}", flush=True)
            return None

    def save(self, part: str, figures: Any) -> None:
        self.figures[part] = figures
        self.write()

    def write(self) -> None:
        self.out.write_text(json.dumps({**self.figures, "failed": self.failed}, indent=1) + "\n")


def where() -> dict[str, Any]:
    device, versions = jax.devices()[0], {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "python": platform.python_version(),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        **versions,
    }


def blocks(run: Run, sizes: Sizes, needed: float) -> None:
    """Saves of each case: its operations, the seconds of every system by round, and how far its
    results are off those of the first."""
    with_torch = importlib.util.find_spec("torch") is not None
    if not with_torch:
        print("no torch here: blocks run in jax only", flush=True)
    found: list[dict[str, Any]] = []
    for case in sizes.cases:
        name = case.name
        start = run.attempt(f"{name}: weights", lambda case=case: init(case, sizes.dtype))
        if start is None:
            continue
        makers: dict[str, Callable[[], Any]] = {
            f"jax {core}": partial(JaxBlock, case, core, start, sizes.iterations)
            for core in sizes.cores
        }
        if with_torch:
            for core in sizes.torch_cores:
                makers[f"torch {core}"] = partial(
                    _torch_block, case, core, sizes.compiler, start, sizes.iterations
                )
        systems, results = {}, {}
        for system, make in makers.items():
            made = run.attempt(f"{name}: {system}", lambda make=make: with_results(make()), needed)
            if made is not None:
                systems[system], results[system] = made
        if not systems:
            continue
        first = next(iter(results.values()))
        difference = {system: apart(x, first) for system, x in results.items()}
        for system, worst in difference.items():
            if not worst <= sizes.agree:
                run.failed[f"{name}: {system}"] = (
                    f"results are {worst:.3g} off those of {next(iter(results))}, more than"
                    f" {sizes.agree:g}"
                )
        times = run.attempt(
            f"{name}: {sizes.rounds} rounds of {len(systems)} systems",
            lambda systems=systems: by_turns(
                {system: made.seconds for system, made in systems.items()}, sizes.rounds
            ),
            ROUNDS if needed else 0.0,
        )
        found.append(
            {
                "case": dataclasses.asdict(case),
                "flops": case.flops(),
                "flops_exact": case.flops(exact=True),
                "difference": difference,
                "seconds": times or {},
            }
        )
        run.save("blocks", found)


def _torch_block(*arguments: Any) -> Any:
    """A block of torch, which may be there and yet fail to start."""
    from gpu_torch import TorchBlock

    return TorchBlock(*arguments)


def with_results(system: Any) -> tuple[Any, list[np.ndarray]]:
    """A block and, on the host in float32, what it computes."""
    return system, [
        np.asarray(x.astype("float32") if isinstance(x, jax.Array) else x.float().cpu()).ravel()
        for x in system.results()
    ]


def apart(results: list[np.ndarray], reference: list[np.ndarray]) -> float:
    """The largest of the relative differences, in norms."""
    return max(
        float(np.linalg.norm(x - r) / np.linalg.norm(r))
        for x, r in zip(results, reference, strict=True)
    )


def step(chip: str, sizes: Sizes, small: bool) -> dict[str, Any]:
    return gpu_step.measure(gpu_step.configuration(chip, small), sizes.rounds, say)


def shards(run: Run, chip: str, sizes: Sizes, small: bool) -> list[dict[str, Any]]:
    """Writes the profile that the planner reads, too: beside --out, with `_profile` in its name."""
    layers = gpu_shards.SMALL if small else gpu_shards.FULL
    cores = sizes.cores[:1] if small else sizes.cores  # half a minute of a CPU's to compile both
    found = gpu_shards.measure(layers, cores, sizes.dtype, chip, sizes.rounds, say)
    for one in found:
        for kernel, why in one["left_out"].items():
            run.failed[f"shards: {one['model']}: {kernel}"] = why
    save_profile(run.out.with_stem(f"{run.out.stem}_profile"), gpu_shards.profile(found))
    return found


def say(words: str) -> None:
    print(words, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="tiny sizes, for any machine")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("gpu.json"))
    parser.add_argument("--limit", type=float, default=450.0, help="seconds (default: 450)")
    options = parser.parse_args()
    if not options.out.parent.is_dir():
        parser.error(f"--out={options.out}: there is no folder {options.out.parent}")
    sizes, run = SMALL if options.small else FULL, Run(options.out, options.limit)
    needed = dict.fromkeys(PARTS, 0.0) if options.small else NEEDED
    chip = gpu_report.chip_of(run.figures["where"]["device"]) or "cpu_core"
    parts: dict[str, Callable[[], Any]] = {
        "loops": partial(gpu_loops.measure, sizes.ticks, (4, 5, 6), sizes.rounds),
        "step": partial(step, chip, sizes, options.small),
        "default": partial(gpu_default.measure, chip, sizes.rounds, options.small, say),
        "shards": partial(shards, run, chip, sizes, options.small),
    }
    for part in options.parts:
        if part == "blocks":  # fail one by one
            blocks(run, sizes, needed[part])
        elif (figures := run.attempt(part, parts[part], needed[part])) is not None:
            run.save(part, figures)
    run.write()
    print("\n\n".join(gpu_report.text(run.figures)))
    for name, words in run.failed.items():
        print(f"failed: {name}: {words.strip().splitlines()[-1]}")
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
