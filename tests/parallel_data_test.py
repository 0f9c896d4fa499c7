"""Processes whose folders of pictures are not alike: all of them are told which, none waits."""

from __future__ import annotations

import pathlib
import re
import shutil

import pytest

from configs.own import get_config
from optimus_jax import processes
from optimus_jax.config import from_config_dict
from optimus_jax.errors import UserError
from optimus_jax.parallel.agreement import loaded_alike
from optimus_jax.train import agreed_examples
from tests.data.small_sets import own_folder
from tests.processes_test import ROOT, python

PROGRAM = """
    import sys
    from configs.own import get_config
    from optimus_jax import cluster
    from optimus_jax.config import from_config_dict
    from optimus_jax.errors import UserError
    from optimus_jax.parallel.agreement import loaded_alike
    from optimus_jax.train import agreed_examples
    cluster.initialize()
    signal.alarm(90)  # one that waits for ever is to end the test
    for name in ("alike", "missing", "unlike"):
        values = get_config().to_dict()
        values["data"]["folder"] = f"{sys.argv[1]}/{rank}/{name}"
        try:
            agreed_examples(from_config_dict(values))
            print(name, "taken", flush=True)
        except UserError as error:
            print(name, error, flush=True)
    try:
        loaded_alike(lambda: (1 // (1 - rank), ""), "numbers")
    except Exception as error:
        print(type(error).__name__, error, flush=True)
"""


def test_all_processes_are_told_which_has_no_data_or_other_data(
    tmp_path: pathlib.Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    own_folder(tmp_path / "0" / "alike")
    for name in ("1/alike", "0/missing", "0/unlike"):
        shutil.copytree(tmp_path / "0/alike", tmp_path / name, dirs_exist_ok=True)
    own_folder(tmp_path / "1/unlike", count=41)
    assert processes.run_local(python(PROGRAM, str(tmp_path)), 2, devices_per_process=1) == 0
    out, err = (re.sub(r"(?m)^(\[1\] )?\[Gloo\].*\n", "", text) for text in capfd.readouterr())
    second = "".join(re.findall(r"(?m)^\[1\] (.*\n)", err))
    for said in (out, second):
        alike, missing, unlike, _ = said.splitlines()
        assert alike == "alike taken"
        assert missing.startswith(f"missing process 1: there is no folder {tmp_path}/1/missing: ")
        assert unlike == (
            "unlike processes have different pictures or captions, process 0 unlike process 1:"
            " give all of them the same"
        )
    division = "ZeroDivisionError integer division or modulo by zero"
    assert second.splitlines()[3] == division
    assert out.splitlines()[3] == f"UserError process 1: {division.replace(' ', ': ', 1)}"


def test_one_process_raises_what_it_raises(tmp_path: pathlib.Path) -> None:
    values = get_config().to_dict()
    values["data"]["folder"] = f"{tmp_path}/none"
    with pytest.raises(UserError, match="^there is no folder"):
        agreed_examples(from_config_dict(values))
    with pytest.raises(ZeroDivisionError):
        loaded_alike(lambda: (1 // 0, ""), "numbers")
    assert loaded_alike(lambda: (3, "x"), "numbers") == (3, "x")
