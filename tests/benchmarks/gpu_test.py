"""The script for a GPU: it runs here at small size, and its tables say what the figures say."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest

from optimus_jax.config import EncoderConfig, LlmConfig
from optimus_jax.cost.kernels import load_profile
from optimus_jax.models import blocks

ROOT = pathlib.Path(__file__).resolve().parents[2]
TORCH = importlib.util.find_spec("torch") is not None


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks import one another by their files' names."""
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.65")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ({}, [None, "0.65"]),
        ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, [None, "0.5"]),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, ["0.5", None]),
    ],
)
def test_the_share_of_memory_has_one_name(
    theirs: dict[str, str], expected: list[str | None]
) -> None:
    names = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"
    environment = {name: value for name, value in os.environ.items() if name not in names}
    line = f"import json, os, gpu; print(json.dumps([os.environ.get(n) for n in {names}]))"
    done = subprocess.run(
        [sys.executable, "-c", line],
        cwd=ROOT / "benchmarks",
        env={**environment, **theirs},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == expected


def small(out: pathlib.Path, *parts: str) -> dict[str, Any]:
    """The figures of a small run, of which nothing failed."""
    words = [sys.executable, "benchmarks/gpu.py", "--small", "--out", str(out), "--parts", *parts]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MFU 0" not in done.stdout and ": met" not in done.stdout  # a CPU has no peak here
    return json.loads(out.read_text())


@pytest.mark.slow
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


@pytest.mark.slow
def test_tasks_and_whole_steps_are_timed(tmp_path: pathlib.Path) -> None:
    figures = small(tmp_path / "gpu.json", "step")
    tasks = {task["task"]: task for task in figures["step"]["tasks"]}
    assert {"F layers", "B layers", "EF whole", "EB whole", "epilogue"} <= tasks.keys()
    assert tasks["B layers"]["flops"] == 3 * tasks["F layers"]["flops"]
    for times in figures["step"]["steps"].values():
        assert len(times) == 3 and min(times) > 0


@pytest.mark.slow
def test_default_steps_and_kernels_of_shards(tmp_path: pathlib.Path, scripts: None) -> None:
    import gpu_shards

    figures = small(tmp_path / "gpu.json", "default", "shards")
    assert [one["dtype"] for one in figures["default"]] == ["float32", "bfloat16"]
    for one in figures["default"]:
        times = [*one["step_s"], one["first_s"], one["compile_s"], one["predicted_s"]]
        assert len(times) == 6 and all(0 < x < math.inf for x in times)
        assert math.isfinite(one["loss"])
    gpt, vit = figures["shards"]
    for one in (gpt, vit):
        assert one["left_out"] == {} and one["chip"] == "cpu_core"
        for row in one["kernels"]:
            assert len(row["seconds"]) == 3 and all(0 < x < math.inf for x in row["seconds"])
            assert set(row["predicted_s"]) == {"cpu_core", "h100", "h200"}
            expected = row["predicted_s"]["cpu_core"] / statistics.median(row["seconds"])
            assert row["ratio"] == pytest.approx(expected)
    # two rows of 16 positions; width 64, and of the shard two heads of 16 and 128 of the MLP
    products = {"qkv": 64 * 96, "out": 32 * 64, "up": 64 * 128, "down": 128 * 64}
    for one, pairs in ((gpt, 16 * 16 // 2), (vit, 16 * 16)):
        flops = {(row["pass"], row["kernel"]): row["flops"] for row in one["kernels"]}
        for name, entries in products.items():
            assert flops["forward", name] == 2 * 32 * entries
            assert flops["backward", f"{name}_weight_gradient"] == 2 * 32 * entries
        assert flops["forward", "attention"] == 2 * 2 * (2 * pairs) * 32
        assert flops["backward", "attention"] == 5 * 2 * (2 * pairs) * 32
        forward = 2 * 32 * sum(products.values()) + 4 * 2 * pairs * 32
        assert flops["forward", "layer"] == forward
        assert flops["both", "layer"] == 3 * forward + 2 * 2 * pairs * 32
    profile = load_profile(tmp_path / "gpu_profile.json")
    (own, _) = gpu_shards.SMALL
    (qkv,) = (row for row in gpt["kernels"] if row["kernel"] == "qkv")
    measured = gpu_shards.predicted(own, "h200", "float32").measured(profile, gpt["model"])
    (found,) = (kernel for kernel in measured.forward if kernel.name == "qkv")
    assert found.seconds == statistics.median(qkv["seconds"])


def test_kernels_are_those_that_the_planner_predicts(scripts: None) -> None:
    import gpu_kernels
    import gpu_shards

    for shard in (*gpu_shards.FULL, *gpu_shards.SMALL):
        names = [(way, name) for way, name, *_ in gpu_kernels.kernels(shard, ("xla",), "bfloat16")]
        expected = gpu_shards.entries(gpu_shards.predicted(shard, "h200", "bfloat16"))
        layers = {("forward", "layer"), ("both", "layer")}
        assert len(set(names)) == len(names) and set(names) == expected.keys() - layers


def test_a_loop_runs_its_kernel_every_time(scripts: None) -> None:
    from gpu_kernels import Run, random

    x, g = (random(k, 4, 4, dtype="float32") for k in range(2))
    zero = np.zeros((4, 4), np.float32)
    run = Run(lambda x, g, total: (total + x.T @ g,), (x, g, jax.device_put(zero)), adds=True)
    changed, _, total = run.loop(3)(*run.operands)
    # between times, a number of the result goes into x, which has a part in the first row only
    np.testing.assert_allclose(total[1:], 3 * (x.T @ g)[1:], rtol=1e-5)
    assert changed[0, 0] == np.clip(total[0, 0], -1, 1) and changed[0, 1] == x[0, 1]


def test_a_layers_shard_is_that_of_the_model(scripts: None) -> None:
    """With one shard there is nothing that it lacks: the layer is the model's own."""
    import gpu_kernels
    import gpu_shards

    for small in gpu_shards.SMALL:
        whole = dataclasses.replace(small, tp=1)
        x, p = gpu_kernels.layer(whole, "xla", "float32", False).operands
        expected = blocks.run(blocks.pieces(whole.part), p, x)
        for core in ("xla", "plain"):
            made = gpu_kernels.layer(whole, core, "float32", False).function(x, p)
            np.testing.assert_allclose(made, expected, rtol=1e-4, atol=1e-4)
        x, g, p, _ = gpu_kernels.layer(small, "xla", "float32", True).operands
        assert x.shape == g.shape == (2, 8, 64)
        assert p["attention"]["qkv"].shape == (64, 3, 2, 16) and p["mlp"]["down"].shape == (128, 64)


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
