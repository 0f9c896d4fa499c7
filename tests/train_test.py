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

import pytest

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
    "--config.parallel.microbatches=2",
    "--config.evaluate_examples=4",
]


def command(workdir: pathlib.Path, *more: str, module: str = "train") -> list[str]:
    return [sys.executable, "-m", f"optimus_jax.{module}", *TINY, f"--workdir={workdir}", *more]


def run(line: list[str], code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(line, capture_output=True, text=True, timeout=400)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done


def losses(workdir: pathlib.Path) -> dict[int, float]:
    """By step, from the metrics file; JSON keeps every bit of a float."""
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


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
    process = subprocess.Popen(command(tmp_path), stdout=subprocess.PIPE, text=True)
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


@pytest.mark.parametrize("pp, dp", [(4, 1), (1, 2)])
def test_a_run_resumes_on_another_plan(
    whole: pathlib.Path, tmp_path: pathlib.Path, pp: int, dp: int
) -> None:
    """The last checkpoint of the run at pp 2 but one, taken up by another plan."""
    shutil.copytree(whole / "checkpoints" / "6", tmp_path / "checkpoints" / "6")
    plan = [f"--config.parallel.pp={pp}", f"--config.parallel.dp={dp}"]
    assert "resumed after step 6" in run(command(tmp_path, *plan)).stdout
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


def test_ctrl_c_saves_and_the_next_run_goes_on(tmp_path: pathlib.Path) -> None:
    line = command(tmp_path, "--config.train.steps=100000", "--config.train.save_every=100000")
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for text in process.stdout:
        if text.startswith("step "):
            break
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
