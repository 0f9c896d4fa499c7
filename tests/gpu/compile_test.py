"""The command compile, and programs compiled for GPUs that are not there."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable
from typing import Any

import pytest

from optimus_jax.errors import UserError
from optimus_jax.gpu import environment
from optimus_jax.gpu.environment import Environment
from tests.bench_test import refused
from tests.conftest import ROOT
from tests.gpu.compilers import built, run

ALL = ("forward", "backward", "gather", "scatter")


def test_a_plan_of_another_size_is_refused_before_anything_is_built() -> None:
    found = refused("compile", "--config=configs/digits.py", "--target=h100x64")
    assert found == [
        "--target=h100x64 has 64 GPUs, the plan 2 devices (dp 1 x pp 2 x tp 1): pass"
        " --target=h100x2 or change the plan"
    ]


def test_wrong_words_are_refused() -> None:
    assert refused("compile", "--config=configs/digits.py", "--target=h1000")[0].startswith(
        "--target=h1000: expected a kind of GPU and how many"
    )
    words = "--config=configs/digits.py", "--target=h100x2", "--hlo=no/such/step.hlo"
    assert refused("compile", *words) == ["--hlo=no/such/step.hlo: there is no folder no/such"]


def check_two_layers(found: dict[str, Any]) -> None:
    """Tied, each collective has encoder products inside; left alone, some have none; synchronous,
    none has any."""
    tied, loose, synchronous = (found[k] for k in ("tied", "loose", "synchronous"))
    for counts in (tied, loose, synchronous):
        assert counts["planned"] == counts["collectives"]
        assert all(counts["planned"][key] >= 1 for key in ALL)
    assert tied["filled"] == tied["planned"]
    assert sum(loose["filled"].values()) < sum(loose["planned"].values())
    assert synchronous["filled"] == dict.fromkeys(ALL, 0)
    assert synchronous["synchronous"] == sum(synchronous["planned"].values())
    assert tied["us"] and all(us > 0 for us in tied["us"])
    assert tied["memory"]["total"] > tied["memory"]["arguments"] > 2**20


@pytest.mark.slow
def test_encoder_work_lies_within_the_collectives_that_it_is_tied_to() -> None:
    wanted = built()
    found = json.loads(run(wanted, "tests.gpu.two_layers", "h100x8"))
    assert f"jax=={found['jax']}" in wanted.requirements
    check_two_layers(found)


@pytest.mark.slow
def test_the_same_with_the_newest_jax() -> None:
    check_two_layers(json.loads(run(built(environment.NEWEST), "tests.gpu.two_layers", "h100x8")))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a100", "h200", "b200"])
def test_the_other_gpus_are_known_to_the_compiler(kind: str) -> None:
    found = json.loads(run(built(), "tests.gpu.two_layers", f"{kind}x8"))
    assert found["tied"]["filled"] == found["tied"]["planned"]


def test_a_half_built_environment_is_not_complete(tmp_path: pathlib.Path) -> None:
    wanted = Environment(tmp_path / "venv", "python3.11", ("jax==1.0",))
    wanted.python.parent.mkdir(parents=True)
    wanted.python.touch()
    assert not wanted.complete
    stamp = wanted.folder / environment.STAMP
    stamp.write_text(wanted.stamp)
    assert wanted.complete
    stamp.write_text(wanted.stamp.replace("1.0", "0.9"))
    assert not wanted.complete


PYTHON = """\
#!/bin/sh
if [ "$2" = venv ]; then mkdir -p "$4/bin" && cp "$0" "$4/bin/python"; exit; fi
echo "Looking in indexes: none"
echo "ERROR: No matching distribution found for jax==0.0.1" >&2
exit 1
"""


def test_packages_that_cannot_be_had_end_in_pips_words(tmp_path: pathlib.Path) -> None:
    base = tmp_path / "python"
    base.write_text(PYTHON)
    base.chmod(0o755)
    wanted = Environment(tmp_path / "venv", str(base), ("jax==0.0.1",))
    said: list[str] = []
    with pytest.raises(UserError, match="No matching distribution found for jax==0.0.1") as error:
        environment.build(wanted, said.append)
    assert "Looking in" not in str(error.value) and environment.NO_INDEX not in str(error.value)
    assert str(error.value).startswith("venv cannot be built; `")
    assert said == ["building venv for jax==0.0.1: about a minute and 1.1 GB, once"]
    assert wanted.python.exists() and not wanted.complete
    base.write_text(PYTHON.replace("ERROR", "WARNING: broken by 'NewConnectionError(...)'\nERROR"))
    with pytest.raises(UserError, match=f"found for jax==0.0.1\n{environment.NO_INDEX}$"):
        environment.build(wanted, said.append)


def test_every_other_jax_has_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    own = environment.environment()
    assert own.folder == ROOT / ".venv-gpu"
    assert environment.environment(own.requirements[0].partition("==")[2]) == own
    monkeypatch.setattr(environment, "newest_python", lambda: "python3.12")
    other = environment.environment("9.9.9")
    assert other.folder == ROOT / ".venv-gpu-9.9.9"
    assert other.requirements[0] == "jax==9.9.9"
    for wrong in ("a/b", "latest", "1"):
        with pytest.raises(UserError, match="give a version such as 0.10.2, or newest"):
            environment.environment(wrong)
    newest = environment.environment(environment.NEWEST)
    assert newest.requirements[:3] == environment.COMPILER
    assert environment.is_one(str(other.folder)) and environment.is_one(str(own.folder))
    assert not environment.is_one(str(ROOT / ".venv"))


STEP = ("--config=configs/compile_tp.py", "--target=h100x64", "--json")


def check_whole_step(found: dict[str, Any], held: Iterable[str] = ALL) -> None:
    """Most of the LLM's collectives have encoder work planned beside them, and `held` hold it."""
    for key in ("forward", "backward"):
        assert found["planned_windows"][key] >= 0.5 * found["llm_collectives"][key] > 0
    for key in held:
        planned = found["planned_windows"][key]
        assert found["with_encoder_compute"][key] >= 0.95 * planned > 0
    assert found["predicted_us"] > 0 and found["memory"]["total"] > 2**30


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_whole_step_holds_the_encoder_work_that_is_planned() -> None:
    check_whole_step(json.loads(run(built(), "optimus_jax.compile", *STEP)))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("version", ["", environment.NEWEST])
def test_a_whole_step_beside_pairing_off_and_the_control(version: str) -> None:
    words = *STEP, "--pairing=off", "--control", f"--jax={version}"
    found = json.loads(run(built(version), "optimus_jax.compile", *words))
    # jaxlib 0.12.0.1 ends both gatherings before the loop over the first encoder tasks
    check_whole_step(found, [key for key in ALL if key != "gather"] if version else ALL)
    off, control = found["pairing_off"], found["control"]
    for key in ("forward", "backward"):
        assert off["with_encoder_compute"][key] < off["planned_windows"][key]
    assert control["with_encoder_compute"] == dict.fromkeys(ALL, 0)
