"""The commands bench and profile: what is wrong with a command line, and one emulated run."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from configs.bench import get_config
from optimus_jax.bench import runnable, wrong_methods
from optimus_jax.config import Config, from_config_dict
from optimus_jax.cost.costs import Costs
from optimus_jax.schedule.methods import METHODS
from tests.conftest import ROOT
from tests.train_test import QUICK

# Runs a module as python -m does, and says in the end whether it imported jax.
RUN = """
import runpy, sys
try:
    runpy.run_module(sys.argv[1], run_name="__main__", alter_sys=True)
finally:
    print("jax" in sys.modules)
"""


def refused(module: str, *words: str) -> list[str]:
    """What a wrong command line is answered with, before jax is imported."""
    code = RUN.replace("sys.argv[1]", repr(f"optimus_jax.{module}"))
    line = [sys.executable, "-c", code, *words]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "False\n"), done
    return done.stderr.splitlines()


PROCESSES = (
    "--processes=3: the plan has 2 devices (dp 1 x pp 2), and each is to have a process of its own:"
    " pass --processes=2 or change the plan"
)


def test_wrong_methods_and_processes_of_a_bench_are_reported_together() -> None:
    found = refused("bench", "--processes=3", "--methods=filed,phased,nothing")
    assert found[0] == PROCESSES
    assert found[1].startswith("--methods: unknown 'filed', did you mean filled")
    assert found[2].startswith("--methods: unknown 'nothing'")
    assert len(found) == 3
    assert all("(valid: text_only, encoder_first, balanced, phased" in line for line in found[1:])


def test_wrong_processes_and_file_of_a_profile_are_reported_together() -> None:
    found = refused("profile", "--processes=3", "--out=no/such/folder/profile.json")
    assert found == [
        PROCESSES,
        "--out=no/such/folder/profile.json: there is no folder no/such/folder",
    ]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--methods="], "--methods: none named (valid: text_only"),
        (["--processes=1"], "--processes=1: the plan has 2 devices"),
        (["--config.parallel.pp=4", "--config.train.batch=32", "--processes=2"], "4 devices"),
        (["--rounds=0"], "rounds"),
        (["--config=configs/bench.py:pp3"], "configs/bench.py:pp3"),
        (["--config.emulate.encoder=-1"], "config.emulate.encoder: must be positive, got -1.0"),
    ],
    ids=str,
)
def test_a_wrong_bench_ends_in_words(words: list[str], wanted: str) -> None:
    found = refused("bench", *words)
    assert any(wanted in line for line in found), found
    assert not any("Traceback" in line for line in found)


WORDS = ["balanced", "fsdp"]


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, {"balanced": "", "fsdp": ""}),
        ({"ears": True}, {"balanced": "--methods: balanced runs one encoder, the model has 2"}),
        (
            {"cap": 2},
            dict.fromkeys(("encoder_first", "phased"), "needs a cap of at least 4")
            | {"coarse": "needs a cap of at least 6"},
        ),
        ({"batch": 42}, {"fsdp": "42 rows do not divide among 4;"}),
    ],
)
def test_methods_that_do_not_run_a_configuration_are_refused_in_words(
    settings: dict[str, Any], wanted: dict[str, str]
) -> None:
    config = config_of(**settings)
    for method in {*WORDS, *wanted}:
        found = wrong_methods(["text_only", method], config)
        if wanted.get(method):
            assert len(found) == 1 and wanted[method] in found[0]
        else:
            assert found == []
    assert set(runnable(config)) == set(METHODS) - {name for name, why in wanted.items() if why}


def config_of(ears: bool = False, layers: int = 3, batch: int = 80, cap: int = 0) -> Config:
    """Four devices: two replicas of two stages; `layers` of the encoder."""
    values = get_config("pp2_m4").to_dict()
    values["model"]["encoder"]["layers"] = layers
    own = {"layers": 2, "width": 30, "heads": 3, "hidden": 50, "patch": 4, "input": "audio"}
    if ears:
        values["model"] |= {"more_encoders": {"ears": own}, "audio_frames": 16, "audio_bands": 5}
    values["parallel"]["dp"] = 2
    values["parallel"]["encoder_cap"] = cap
    values["train"]["batch"] = 80
    config = from_config_dict(values)
    return dataclasses.replace(config, train=dataclasses.replace(config.train, batch=batch))


@pytest.mark.parametrize("module", ["bench", "profile"])
def test_a_cluster_of_another_size_is_refused(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_NUM_PROCESSES", "3")
    monkeypatch.setenv("JAX_PROCESS_ID", "0")
    line = [sys.executable, "-m", f"optimus_jax.{module}"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == "3 processes were started, the plan has 2 devices\n"


@pytest.mark.slow  # colab/bubbles.ipynb runs one in every suite
def test_an_emulated_bench_in_two_processes(tmp_path: pathlib.Path) -> None:
    methods, rounds, f = ("text_only", "balanced", "phased", "filled"), 2, 0.005
    line = [
        *(sys.executable, "-m", "optimus_jax.bench", "--config=configs/bench.py:pp2_m4"),
        *("--emulate", "--json", f"--rounds={rounds}", f"--methods={','.join(methods)}"),
        *(f"--workdir={tmp_path / 'run'}", f"--config.emulate.chunk_forward_s={f}"),
        *("--config.emulate.encoder=1", "--config.emulate.encoder_backward=2"),
    ]
    environment = os.environ | QUICK
    done = subprocess.run(
        line, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "run" / "report"
    names = {"report.json", "report.txt", "profile.json", "trace.json", "timeline.html"}
    assert {path.name for path in folder.iterdir()} == names
    *said, last = done.stdout.splitlines()
    found = json.loads(last)
    assert (found["emulated"], found["rounds"]) == (True, rounds)
    assert list(found["methods"]) == list(methods)
    everything = json.loads((folder / "report.json").read_text())
    check_times(found, everything, f)
    assert any(str(folder) in line for line in said)
    assert (folder / "report.txt").read_text().strip() in done.stdout

    costs = Costs.load(folder / "profile.json")
    assert 0.5 * f < 2 * costs.llm_layer.forward < 20 * f, "two layers"
    assert found["costs"]["exchange"] == costs.exchange

    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    shown = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert shown == {f"{m}, {kind}" for m in methods for kind in ("predicted", "measured")}
    for name in methods:
        assert name in (folder / "timeline.html").read_text()


def check_times(found: dict[str, Any], everything: dict[str, Any], f: float) -> None:
    """Every task sleeps, so no step is shorter than its tasks; how much longer, loaded cores say.
    F = f, B = 2f, and the encoder's work of a microbatch takes 3f."""
    for name, times in (("F", 1), ("B", 2), ("e", 1), ("e_b", 2)):
        assert 0.5 * times * f < found["costs"][name] < 20 * times * f
    sleeps = {"text_only": 15 * f, "phased": 21 * f, "filled": 16.5 * f, "balanced": 16.5 * f}
    for name, method in found["methods"].items():
        times = everything["times"][name]
        assert len(times) == found["rounds"]
        assert min(times) >= sleeps[name]
        assert method["measured_s"] == pytest.approx(sum(times) / 2)
        assert method["predicted_s"] >= 0.5 * sleeps[name]
        assert method["measured_s"] < 20 * method["predicted_s"]
    assert found["bound_s"] <= found["methods"]["filled"]["predicted_s"] + 1e-9
    phased, filled = (everything["times"][m] for m in ("phased", "filled"))
    ratios = [a / b for a, b in zip(phased, filled, strict=True)]
    assert found["ratios"]["phased/filled"] == pytest.approx(sum(ratios) / 2)
