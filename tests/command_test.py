"""Command lines, right and wrong, as a user types them."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest
from absl import flags

from optimus_jax import command
from optimus_jax.config import Config, EncoderParallel
from tests.conftest import ROOT, RunHere

CONFIG = """
from configs.digits import get_config as digits

def get_config(order="1f1b"):
    c = digits()
    c.train.batch = 16
    c.parallel.order = order
    return c
"""


@pytest.fixture
def other(tmp_path: pathlib.Path) -> pathlib.Path:
    """A config file that differs from the default one in its batch."""
    path = tmp_path / "other.py"
    path.write_text(CONFIG)
    return path


def plan(*words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "optimus_jax.plan", *words]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_everything_wrong_with_a_command_line_is_said_at_once() -> None:
    done = plan(
        "--config.parallel.pp=5",
        "--config.train.batch=33",
        "--config.parallel.method=filed",
        "--config.model.encoder.widht=32",
        "--config.modl.llm.width=32",
        "--config.train.steps=ten",
        "--config.train.learning_rate",
        "--config.model.llm=3",
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "8 error(s) in the configuration:",
        "  config.model.encoder.widht: unknown, did you mean width?"
        " (valid: block, heads, hidden, input, layers, patch, width)",
        "  config.modl: unknown, did you mean model?"
        " (valid: data, emulate, evaluate_examples, hardware, model, parallel, train)",
        "  config.train.steps: expected a whole number, got 'ten'",
        "  config.train.learning_rate: no value; write --config.train.learning_rate=value",
        "  config.model.llm: a group of settings; set one of block, heads, hidden, kv_heads,"
        " layers, width",
        "  config.parallel.method: unknown 'filed', did you mean filled or filled_whole?"
        " (valid: text_only, encoder_first, balanced, phased, coarse, filled_whole, filled)",
        "  config.train.batch: 33 rows do not divide into dp 1 x microbatches 4 x encoder units 5"
        " (one for each replica of an encoder beside the pipeline) = 20 parts; 20 or 40 would",
        "  config.parallel: pp 5 x chunks 1 = 5 virtual stages, but the LLM has 4 layers; each"
        " needs at least one",
    ]


def test_json_is_one_object_on_the_last_line() -> None:
    done = plan("--json", "--config.parallel.method=phased", "--config.parallel.microbatches=2")
    assert (done.returncode, done.stderr) == (0, "")
    *lines, last = done.stdout.splitlines()
    found = json.loads(last)
    assert found["method"] == "phased"
    assert found["schedule"].startswith("0: EF0 F0 F1 B0 B1 EB0")
    assert found["predicted_step_s"] == found["program_s"] + found["epilogue_s"] > 0
    assert found["schedule"].splitlines() == lines[-2:]
    assert found["timeline"] in done.stdout


def show() -> int:
    config = command.config()
    command.say(f"{config.train.batch} {config.parallel.order} {config.train.learning_rate}")
    command.say(str(command.workdir()))
    return 0


def test_overrides_change_the_default_configuration(run_here: RunHere) -> None:
    done = run_here(show, "--config.train.batch=0x28", "-config.train.learning_rate=1")
    assert (done.code, done.out, done.err) == (0, "40 1f1b 1.0\nruns/digits\n", "")


def test_what_a_configuration_leaves_out_can_be_set_too(run_here: RunHere) -> None:
    found: list[Config] = []
    words = ["parallel.encoder.pp=2", "parallel.zero=False", "parallel.tp=2", "data.hide_text=1"]
    words += ["model.vocabulary=84", "model.text_length=10", "parallel.recompute=none"]
    done = run_here(lambda: found.append(command.config()), *(f"--config.{word}" for word in words))
    assert (done.code, done.err) == (0, "")
    parallel = found[0].parallel
    assert (parallel.tp, parallel.zero, parallel.recompute) == (2, False, "none")
    assert parallel.encoder == EncoderParallel(pp=2)
    assert found[0].data.hide_text == 1.0
    done = run_here(show, "--config.parallel.encoder.pp=two", "--config.parallel.encoder.dp=2")
    assert done.err.splitlines()[1:] == [
        "  config.parallel.encoder.pp: expected a whole number, got 'two'",
        "  config.parallel.encoder.dp: unknown, did you mean tp or pp? (valid: pp, recompute,"
        " sequence_parallel, tp)",
    ]


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("apart", [True, False])
def test_a_config_file_may_stand_anywhere(
    run_here: RunHere, other: pathlib.Path, place: int, apart: bool
) -> None:
    words = ["--config.parallel.pp=1", "--config.train.learning_rate=0.5"]
    words[place:place] = ["--config", str(other)] if apart else [f"--config={other}"]
    assert run_here(show, *words).out == "16 1f1b 0.5\nruns/other\n"


def test_a_config_file_takes_an_argument_and_the_last_one_counts(
    run_here: RunHere, other: pathlib.Path
) -> None:
    done = run_here(show, "--config=configs/digits.py", f"--config={other}:gpipe", "--workdir=w")
    assert done.out == "16 gpipe 0.002\nw\n"


def test_overrides_are_checked_against_the_file_that_is_named(
    run_here: RunHere, other: pathlib.Path
) -> None:
    done = run_here(show, "--config", str(other), "--config.parallel.microbatches=16")
    assert done.code == 2
    assert "config.train.batch: 16 rows do not divide" in done.err


WRONG = [
    (["--config=configs/nope.py"], "no file 'configs/nope.py'; there is configs/bench.py"),
    (["--config", "configs/nope.py"], "no file 'configs/nope.py'; there is configs/bench.py"),
    (["--config="], "--config=: no file ''; there is configs/bench.py"),
    (["--config"], "Missing value for flag --config"),
    (["--workdir"], "Missing value for flag --workdir"),
    (["--confg=1"], "Unknown command line flag 'confg'. Did you mean: config ?"),
    (["--noconfig.train.batch"], "Unknown command line flag 'noconfig.train.batch'"),
    (["--json=maybe"], "--json=maybe"),
    (["train"], "not understood: train (options look like --name=value)"),
    (["--config.train.batch", "40"], "config.train.batch: no value; write --config.train.batch="),
    (["--config.train.batch="], "config.train.batch: expected a whole number, got ''"),
    (["--config.train.batch={[]:1}"], "expected a whole number, got '{[]:1}'"),
    (["--config.train.batch.x=1"], "config.train.batch.x: unknown (valid: )"),
    (["--config.train.clip=1e999"], "config.train.clip: expected a finite number, got inf"),
    (["--config.train.clip=nan"], "config.train.clip: expected a number, got 'nan'"),
    (["--config.train.clip=1" + "0" * 400], "config.train.clip: expected a number, got '1000"),
    (["--config=launch/setup.sh"], "--config=launch/setup.sh: SyntaxError"),
]


@pytest.mark.parametrize(("words", "wanted"), WRONG, ids=lambda x: str(x)[:50])
def test_a_wrong_command_line_ends_in_words(
    run_here: RunHere, words: list[str], wanted: str
) -> None:
    done = run_here(show, *words)
    assert (done.code, done.out) == (2, "")
    assert wanted in done.err


@pytest.mark.parametrize("result", ["3", "None", "dict(train=1)"])
def test_a_config_file_must_make_a_config_dict(
    run_here: RunHere, tmp_path: pathlib.Path, result: str
) -> None:
    path = tmp_path / "wrong.py"
    path.write_text(f"def get_config():\n    return {result}\n")
    done = run_here(show, f"--config={path}")
    assert done.code == 2
    assert "get_config() must return a ConfigDict, not" in done.err


def test_errors_of_a_config_file_itself_are_listed(
    run_here: RunHere, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "half.py"
    path.write_text(CONFIG.replace("return c", "del c.data; c.train.batches = 3; return c"))
    done = run_here(show, f"--config={path}", "--config.train.seed=-1")
    assert done.err.splitlines() == [
        "3 error(s) in the configuration:",
        "  config.data: missing",
        "  config.train.batches: unknown, did you mean batch? (valid: seed, batch, steps,"
        " learning_rate, warmup, weight_decay, clip, log_every, save_every, keep)",
        "  config.train.seed: must not be negative, got -1",
    ]


def interrupted() -> int:
    raise KeyboardInterrupt


def mistaken() -> int:
    raise command.UserError("turn it round")


@pytest.mark.parametrize(
    ("main", "code", "err"),
    [
        (interrupted, 130, "interrupted\n"),
        (mistaken, 2, "turn it round\n"),
        (lambda: 7, 7, ""),
        (lambda: None, 0, ""),
    ],
)
def test_the_exit_code_says_how_it_ended(run_here: RunHere, main, code: int, err: str) -> None:
    done = run_here(main)
    assert (done.code, done.err) == (code, err)


def test_an_error_of_the_program_itself_is_not_hidden(run_here: RunHere) -> None:
    def broken() -> int:
        raise AssertionError("a bug")

    with pytest.raises(AssertionError, match="a bug"):
        run_here(broken)


def test_only_the_first_process_speaks(run_here: RunHere, monkeypatch: pytest.MonkeyPatch) -> None:
    def speak() -> None:
        command.say("hello")
        command.emit({"json": flags.FLAGS.json})

    assert run_here(speak, "--json").out == 'hello\n{"json": true}\n'
    monkeypatch.setenv("JAX_PROCESS_ID", "1")
    assert run_here(speak, "--json").out == ""
    monkeypatch.setenv("JAX_PROCESS_ID", "0")
    assert run_here(speak, "--nojson").out == 'hello\n{"json": false}\n'


def test_numbers_that_json_does_not_know_are_not_emitted() -> None:
    with pytest.raises(ValueError, match="JSON"):
        command.emit({"loss": float("nan")})


def test_help_names_the_command_and_its_options() -> None:
    done = plan("--help")
    assert done.returncode == 0
    assert done.stdout.startswith("python -m optimus_jax.plan: ")
    for option in ("--config:", "--config.KEY=VALUE:", "--workdir:", "--json:"):
        assert f"\n  {option}" in done.stdout
