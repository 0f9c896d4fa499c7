"""The script for a GPU: it runs here at small size, and its tables say what the figures say."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from optimus_jax.config import EncoderConfig, LlmConfig

ROOT = pathlib.Path(__file__).resolve().parents[2]
TORCH = importlib.util.find_spec("torch") is not None


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks import one another by their files' names."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.65")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def small(out: pathlib.Path, *parts: str) -> dict[str, Any]:
    """The figures of a small run, of which nothing failed."""
    words = [sys.executable, "benchmarks/gpu.py", "--small", "--out", str(out), "--parts", *parts]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MFU 0" not in done.stdout and ": met" not in done.stdout  # a CPU has no peak here
    return json.loads(out.read_text())


def test_blocks_agree_between_cores_and_with_torch(tmp_path: pathlib.Path) -> None:
    figures = small(tmp_path / "gpu.json", "blocks", "loops")
    assert figures["failed"] == {} and figures["where"]["platform"] == "cpu"
    systems = ["jax xla", "jax plain"] + ["torch flash", "torch math"] * TORCH
    assert len(figures["blocks"]) == 3
    for one in figures["blocks"]:
        assert list(one["seconds"]) == systems
        assert all(len(times) == 3 and min(times) > 0 for times in one["seconds"].values())
        first, *others = (one["difference"][system] for system in systems)
        assert first == 0 and all(0 < x < 1e-5 for x in others)
    (alone,) = (x for x in figures["loops"] if x["what"] == "scan alone")
    assert set(alone["beyond_scan_s"]) == {0.0}
    assert [x["loops"] for x in figures["loops"] if x["trips"] == "no trip"] == [0, 4, 5, 6]


def test_tasks_and_whole_steps_are_timed(tmp_path: pathlib.Path) -> None:
    figures = small(tmp_path / "gpu.json", "step")
    tasks = {task["task"]: task for task in figures["step"]["tasks"]}
    assert {"F layers", "B layers", "EF whole", "EB whole", "epilogue"} <= tasks.keys()
    assert tasks["B layers"]["flops"] == 3 * tasks["F layers"]["flops"]
    for times in figures["step"]["steps"].values():
        assert len(times) == 3 and min(times) > 0


def test_operations_of_a_case(scripts: None) -> None:
    from gpu_blocks import Case

    gpt = Case("", LlmConfig(layers=5, width=8, heads=2, hidden=32), rows=2, length=3)
    # one layer: 12 width^2 weights, 6 operations each and position; 12 width length^2 a sequence
    assert gpt.flops() == 2 * (6 * 3 * 12 * 64 + 12 * 8 * 9)
    assert gpt.flops(exact=True) == 2 * (6 * 3 * 12 * 64 + 6 * 8 * 9)
    llama = Case("", LlmConfig(1, 8, 4, 20, block="llama", kv_heads=2), rows=1, length=3)
    weights = 2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 20  # q and out, k and v, gate, up and down
    assert llama.flops() == 6 * 3 * weights + 12 * 8 * 9
    vit = Case("", EncoderConfig(1, 8, 2, 32, patch=14, block="vit22b"), rows=2, length=3)
    assert vit.flops(exact=True) == vit.flops() == gpt.flops()


def test_goals_in_the_tables(scripts: None) -> None:
    import gpu_report

    place = {"device": "NVIDIA H200", "platform": "gpu"}
    case = {"name": "GPT", "part": {"width": 4096}, "rows": 4, "length": 2048}
    block = {
        "case": case,
        "flops": 9.89e12,  # a hundredth of the peak's second
        "flops_exact": 9.89e12 * 0.9,
        "difference": {"jax cudnn": 0.0, "torch flash": 0.01, "torch cudnn": 0.01},
        "seconds": {
            "jax cudnn": [0.02] * 3,
            "torch flash": [0.022] * 3,
            "torch cudnn": [0.019] * 3,
        },
    }
    steps = {"executor": [1.02, 1.02], "plain": [1.0, 1.0]}
    step = {"tasks": [], "steps": steps}
    words = "\n".join(gpu_report.text({"where": place, "blocks": [block], "step": step}))
    assert "torch cudnn / jax cudnn 0.950 (IQR 0.000), goal at least 1.0: missed" in words
    assert "MFU 50.0 % of 989 TFLOP/s, goal at least 55 %: missed" in words
    assert "45.0 %" in words  # the exact count
    assert "executor / plain 1.020 (IQR 0.000), goal at most 1.03: met" in words


def test_the_rest_runs_when_something_fails_or_time_is_up(
    scripts: None, tmp_path: pathlib.Path
) -> None:
    import gpu

    run = gpu.Run(tmp_path / "gpu.json", limit=60.0)
    assert run.attempt("broken", lambda: 1 / 0) is None
    assert run.attempt("whole", lambda: 7) == 7
    assert run.attempt("late", lambda: 7, needed=90.0) is None
    run.save("whole", 7)
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["whole"] == 7 and "left, it may need 90" in written["failed"]["late"]
    assert "ZeroDivisionError" in written["failed"]["broken"]
