"""Training as a user runs it: killed and resumed, on other plans, in two processes."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from optimus_jax import cluster, evaluate, train, xla_reader
from tests.conftest import RunHere

TINY = [
    "--config=configs/digits.py",
    "--config.train.steps=8",
    "--config.train.warmup=2",
    "--config.train.batch=8",
    "--config.train.log_every=1",
    "--config.train.save_every=2",
    "--config.model.llm.layers=4",
    *(f"--config.model.{part}.width=16" for part in ("llm", "encoder")),
    *(f"--config.model.{part}.hidden=16" for part in ("llm", "encoder")),
    "--config.model.projector_hidden=16",
    "--config.model.vocabulary=84",  # so that two can share the model
    "--config.model.text_length=10",
    "--config.parallel.microbatches=2",
    "--config.evaluate_examples=4",
]


# the checks are the same without optimised machine code, which takes most of a tiny run's time
# those that the installed jaxlib knows; newer ones have no second kind of emitters
WORDS = {"xla_backend_optimization_level": "0", "xla_cpu_use_fusion_emitters": "false"}
QUICK = {"XLA_FLAGS": " ".join(f"--{n}={v}" for n, v in WORDS.items() if xla_reader.known(n))}


def command(workdir: pathlib.Path, *more: str, module: str = "train") -> list[str]:
    return [sys.executable, "-m", f"optimus_jax.{module}", *TINY, f"--workdir={workdir}", *more]


def run(line: list[str], code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = os.environ | QUICK
    done = subprocess.run(line, capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done


def await_step(process: subprocess.Popen[str]) -> None:
    """Reads what a run says until it has logged a step."""
    assert process.stdout is not None
    for text in process.stdout:
        if text.startswith("step "):
            return


def losses(workdir: pathlib.Path) -> dict[int, float]:
    """By step, from the metrics file; JSON keeps every bit of a float."""
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


def slow(plan: str) -> Any:
    return pytest.param(plan, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """An uninterrupted run of 8 steps at pp 2."""
    workdir = tmp_path_factory.mktemp("whole")
    done = run(command(workdir, "--json"))
    values = json.loads(done.stdout.splitlines()[-1])
    assert values["loss"] == losses(workdir)[7]
    assert (workdir / "report" / "timeline.png").stat().st_size > 10_000
    assert list((workdir / "tensorboard").iterdir())
    return workdir


def test_killed_and_started_again_gives_the_same_curve_bit_for_bit(
    whole: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    process = subprocess.Popen(
        command(tmp_path), stdout=subprocess.PIPE, text=True, env=os.environ | QUICK
    )
    committed = tmp_path / "checkpoints" / "4"
    deadline = time.monotonic() + 300
    while not committed.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    done = run(command(tmp_path))
    assert "resumed after step" in done.stdout
    assert losses(tmp_path) == losses(whole) and len(losses(whole)) == 8
    assert "nothing to do" in run(command(tmp_path)).stdout


@pytest.mark.parametrize(
    "plan",
    [
        slow("pp=4 order=gpipe"),
        "pp=2 tp=2 encoder.pp=2 recompute=selective encoder.recompute=none",
        slow("pp=1 dp=2 zero=False recompute=none"),
        slow("pp=1 tp=2 encoder.tp=2 sequence_parallel=False gradients=float32"),
        slow("pp=2 method=balanced"),
    ],
)
def test_a_run_resumes_on_another_plan(
    whole: pathlib.Path, tmp_path: pathlib.Path, plan: str
) -> None:
    """The last checkpoint of the run at pp 2 but one, taken up by another plan."""
    shutil.copytree(whole / "checkpoints" / "6", tmp_path / "checkpoints" / "6")
    words = [f"--config.parallel.{word}" for word in plan.split()]
    assert "resumed after step 6" in run(command(tmp_path, *words)).stdout
    got, want = losses(tmp_path), losses(whole)
    assert got.keys() == {6, 7}
    assert got[6] == pytest.approx(want[6], rel=1e-6)  # before this plan's own updates
    assert got[7] == pytest.approx(want[7], rel=1e-5)


def test_two_processes_train_as_one(whole: pathlib.Path, tmp_path: pathlib.Path) -> None:
    line = [sys.executable, "launch/local.py", "--processes=2", "--", *command(tmp_path)]
    run(line)
    got, want = losses(tmp_path), losses(whole)
    assert got.keys() == want.keys()
    assert all(got[n] == pytest.approx(want[n], rel=1e-5) for n in want)


def test_a_written_plan_trains_whatever_the_configuration_says(
    whole: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """The plan of pp 2 runs where the configuration asks for pp 1; another model is refused."""
    line = [x for x in command(tmp_path, module="plan") if not x.startswith("--workdir")]
    run([*line, f"--out={tmp_path}"])
    plan = f"--plan={tmp_path / 'plan.json'}"
    other = "--config.parallel.pp=1", "--config.parallel.method=phased"
    run(command(tmp_path / "run", plan, *other))
    assert losses(tmp_path / "run") == losses(whole)
    done = run(command(tmp_path / "deep", plan, "--config.model.llm.layers=6"), code=2)
    assert "its LLM has 4 layers, config.model.llm.layers is 6" in done.stderr


@pytest.mark.slow
def test_ctrl_c_saves_and_the_next_run_goes_on(tmp_path: pathlib.Path) -> None:
    line = command(tmp_path, "--config.train.steps=100000", "--config.train.save_every=100000")
    pipe = subprocess.PIPE
    process = subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True, env=os.environ | QUICK)
    await_step(process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, out + err
    assert "Traceback" not in err and "saved" in out
    (step,) = (p.name for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit())
    more = f"--config.train.steps={int(step) + 1}"
    assert f"resumed after step {step}" in run(command(tmp_path, more)).stdout


def test_evaluate_and_generate_use_the_trained_weights(whole: pathlib.Path) -> None:
    done = run(command(whole, "--json", module="evaluate"))
    values = json.loads(done.stdout.splitlines()[-1])
    assert values.keys() == {"digit_accuracy", "shuffled_accuracy"}
    picture = sorted((whole / "samples").iterdir())[0]
    done = run(command(whole, "--json", f"--image={picture}", module="generate"))
    caption = json.loads(done.stdout.splitlines()[-1])["caption"]
    assert picture.stem.endswith("read_" + caption.replace(" ", ""))


def test_another_model_does_not_resume(whole: pathlib.Path) -> None:
    done = run(command(whole, "--config.model.llm.width=32", "--config.train.steps=9"), code=2)
    assert "llm.width: 16 there, 32 in the configuration" in done.stderr


SOUND = """
from ml_collections import ConfigDict
from configs.digits import get_config as digits

def get_config():
    c = digits()
    c.model.audio_frames = c.model.audio_bands = 16
    c.model.more_encoders = ConfigDict(
        dict(sound=dict(layers=1, width=16, heads=2, hidden=16, patch=4, input="audio"))
    )
    return c
"""


@pytest.mark.parametrize("main", [train.main, evaluate.main], ids=["train", "evaluate"])
def test_what_no_data_set_has_is_not_trained_on(
    run_here: RunHere, tmp_path: pathlib.Path, main: Callable[[], int]
) -> None:
    path = tmp_path / "sound.py"
    path.write_text(SOUND)
    done = run_here(main, f"--config={path}", f"--workdir={tmp_path}")
    assert done.code == 2
    assert done.err.startswith(
        "encoder 'sound' takes audio, but the data set 'digits' has pictures only"
    )


def test_too_many_processes_are_refused_with_the_plans_sizes(
    run_here: RunHere, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_NUM_PROCESSES", "3")
    monkeypatch.setattr(cluster, "initialize", lambda: None)
    monkeypatch.setattr(os, "_exit", sys.exit)
    words = ["parallel.tp=2", "parallel.dp=2", "model.vocabulary=84", "model.text_length=10"]
    words.append("train.batch=64")
    done = run_here(train.main, *(f"--config.{w}" for w in words), f"--workdir={tmp_path}")
    assert done.code == 2
    assert done.err == (
        "3 processes cannot share 8 devices (dp 2 x pp 2 x tp 2) evenly: start a number of"
        " processes that divides 8\n"
    )


def test_a_plan_that_keeps_too_much_is_refused_before_anything_compiles(
    run_here: RunHere, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "prepare_devices", lambda config, **_: None)
    words = ["parallel.method=encoder_first", "parallel.encoder_cap=1"]
    done = run_here(train.main, *(f"--config.{w}" for w in words), f"--workdir={tmp_path}")
    assert done.code == 2
    assert done.err.startswith(
        "there is no plan for this configuration: encoder_first keeps more saved encoder state than"
    )
