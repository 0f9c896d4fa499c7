"""8 CPU devices for all tests, whatever the machine has, and commands run within the test."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
from absl import flags
from absl.testing import flagsaver

from configs.digits import get_config
from optimus_jax import command

ROOT = pathlib.Path(__file__).resolve().parents[1]

os.environ["JAX_PLATFORMS"] = "cpu"  # of the processes that tests start
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture
def values() -> dict[str, Any]:
    """The settings of configs/digits.py, to change and to build a Config from; with sizes of their
    own where tests count on them, so that the default configuration may change."""
    values = get_config().to_dict()
    values["model"]["encoder"] |= {"layers": 2, "width": 64, "hidden": 256}
    values["model"]["llm"] |= {"layers": 2, "width": 64, "hidden": 256}
    values["train"]["steps"] = 1750
    return values


@dataclasses.dataclass(frozen=True)
class Done:
    """What a command left: its exit code and what it printed."""

    code: int
    out: str
    err: str


RunHere = Callable[..., Done]


@pytest.fixture
def run_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[RunHere]:
    """Runs a command's main in this process, from the repository's root, on a command line."""
    command.define_config()
    monkeypatch.chdir(ROOT)

    def run(main: Callable[[], int | None], *words: str, **options: bool) -> Done:
        monkeypatch.setattr(sys, "argv", ["prog", *words])
        with pytest.raises(SystemExit) as ended:
            command.run(main, **options)
        return Done(ended.value.code, *capsys.readouterr())

    with flagsaver.flagsaver():
        flags.FLAGS.set_default("config", command.DEFAULT_CONFIG)  # whatever other tests imported
        yield run
    flags.FLAGS.unparse_flags()
