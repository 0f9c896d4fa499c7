"""What starting a run takes: python benchmarks/startup.py [--rounds=5] [options of train].

Starts the training of a configuration over and over, each time for 2 steps in a folder of its own:
without a persistent compilation cache, with one that is empty, and with one that an earlier start
has filled, by turns; each in one process and in two. What a start consists of is what `train` says
of itself (optimus_jax/startup.py). Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from optimus_jax.tables import table_text

ROOT = pathlib.Path(__file__).resolve().parents[1]
CACHE = "JAX_COMPILATION_CACHE_DIR"
CACHES = ("none", "empty", "filled")


def start(options: list[str], processes: int, cache: pathlib.Path | None) -> dict[str, float]:
    """Seconds of each part of one start, and of what jax compiled in it."""
    environment = {key: value for key, value in os.environ.items() if key != CACHE}
    if cache is not None:
        environment[CACHE] = str(cache)
    with tempfile.TemporaryDirectory() as folder:
        short = ["--config.train.steps=2", "--config.train.warmup=1", f"--workdir={folder}"]
        line = [sys.executable, "-m", "optimus_jax.train", *options, *short]
        if processes > 1:
            local = [sys.executable, "launch/local.py", f"--processes={processes}", "--"]
            line = [*local, *line]
        subprocess.run(line, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        report = json.loads((pathlib.Path(folder) / "report" / "report.json").read_text())
    found = report["startup"]
    parts = found.pop("parts")
    return {**parts, "together": found["seconds"], "jax compiles": found["compile_s"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="a JSON file for all figures")
    asked, options = parser.parse_known_args()
    kinds = [(processes, cache) for processes in (1, 2) for cache in CACHES]
    found: dict[str, list[dict[str, float]]] = {}
    for n in range(asked.rounds):
        for processes, kind in kinds:
            if kind == "empty":
                kept = tempfile.TemporaryDirectory()
            folder = None if kind == "none" else pathlib.Path(kept.name)
            name = f"{processes} process{'es' if processes > 1 else ''}, cache {kind}"
            found.setdefault(name, []).append(start(options, processes, folder))
            seconds = found[name][-1]["together"]
            print(f"round {n + 1}, {name}: first step after {seconds:.1f} s", flush=True)
    rows = []
    for name, starts in found.items():
        medians = [statistics.median(one[part] for one in starts) for part in starts[0]]
        ends = sorted(one["together"] for one in starts)
        rows.append([name, *(f"{m:.1f}" for m in medians), f"{ends[0]:.1f} to {ends[-1]:.1f}"])
    print(table_text(["seconds, medians", *next(iter(found.values()))[0], "range"], rows))
    if asked.out:
        pathlib.Path(asked.out).write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
