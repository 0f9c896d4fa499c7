"""What a start takes, by part."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from optimus_jax import startup
from optimus_jax.startup import Startup
from tests.conftest import ROOT
from tests.train_test import QUICK, TINY


def test_parts_add_up_from_the_start_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(startup, "age", lambda: 100.0)
    monkeypatch.setattr(startup.time, "perf_counter", lambda: now)
    found = Startup()
    now += 2
    found.done("packages")
    now += 0.5
    found.done("plan")
    now += 7
    assert found.parts == {"packages": 102.0, "plan": 0.5}
    assert found.seconds == 102.5
    assert str(found) == "first step after 102.5 s: packages 102.0, plan 0.5"
    found.close()


def test_what_jax_compiles_is_counted_until_the_close() -> None:
    found = Startup()
    jax.jit(lambda x: jnp.sin(x) + 3)(jnp.ones(7)).block_until_ready()
    found.close()
    counted = found.values()
    assert counted["compile_s"] > 0
    assert counted["trace_s"] > 0
    jax.jit(lambda x: jnp.cos(x) + 5)(jnp.ones(7)).block_until_ready()
    assert found.values() == counted


def test_age_of_a_process() -> None:
    code = "import time; time.sleep(0.3); from optimus_jax.startup import age; print(age())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert 0.3 <= float(done.stdout) < 60


def test_age_where_the_uptime_is_a_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    read = pathlib.Path.read_text
    monkeypatch.setattr(
        pathlib.Path, "read_text", lambda p: "0.01 0.01" if p.name == "uptime" else read(p)
    )
    assert startup.age() == 0


@pytest.mark.slow
def test_a_second_start_reads_the_persistent_cache(tmp_path: pathlib.Path) -> None:
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", **QUICK}
    found = []
    for run in ("first", "second"):
        workdir = tmp_path / run
        line = [sys.executable, "-m", "optimus_jax.train", *TINY, f"--workdir={workdir}"]
        done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "first step after" in done.stdout
        found.append(json.loads((workdir / "report" / "report.json").read_text())["startup"])
    cold, warm = found
    assert "cache_s" not in cold
    assert warm["cache_s"] > 0
    assert warm["compile_s"] < cold["compile_s"] / 2
