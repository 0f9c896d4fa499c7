"""The command verify: its JSON, its exit code, and, slowly, its whole grid in two processes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from optimus_jax.verified import all_cases


def verify(*words: str) -> tuple[int, dict]:
    line = [sys.executable, "-m", "optimus_jax.verify", "--json", *words]
    done = subprocess.run(line, capture_output=True, text=True, timeout=3600)
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def test_a_broken_run_ends_with_code_1() -> None:
    code, found = verify("--inject=swap_slots", "--match=filled/1f1b")
    assert code == 1 and found["cases"] == len(found["list"]) == 1
    assert found["worst_grad_rel_err"] >= 1e-2


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_grid_holds_in_two_processes() -> None:
    code, found = verify("--processes=2")
    plans = list(all_cases())
    assert code == 0 and found["plans"] == len(plans) == 96
    assert found["cases"] == sum(map(len, plans)) >= 350
    assert found["worst_loss_rel_err"] <= 1e-6
    assert found["worst_grad_rel_err"] <= 1e-5


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_pipeline_compiled_as_for_training_holds_too() -> None:
    code, found = verify("--optimize", "--match=pp2 dp1 tp1 V1")
    assert code == 0 and found["cases"] >= 30
