"""The variables of NCCL, CUDA and jax: of each GPU generation, the user's own, and what is said."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from optimus_jax import cluster, launchers, train, xla_flags
from optimus_jax.gpu_settings import TABLE
from tests.conftest import ROOT, RunHere
from tests.xla_flags_test import LIMIT, run
from tests.xla_flags_test import no_settings as no_settings  # a fixture


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes this a machine with GPUs of that name."""

    def pretend(name: str) -> None:
        monkeypatch.setattr(cluster, "platform", lambda: "gpu")
        monkeypatch.setattr(cluster, "gpus", lambda: f"GPU 0: NVIDIA {name} (UUID: GPU-0)")

    return pretend


COMMON = {"NCCL_DEBUG": "WARN", "XLA_CLIENT_MEM_FRACTION": "0.9"}
SUMS = {"NCCL_NVLS_ENABLE": "1"}
OF_GENERATION = {
    "A100-SXM4-80GB": COMMON,
    "H100 80GB HBM3": COMMON | SUMS | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    "B200": COMMON | SUMS,
    "L40S": COMMON,
}


@pytest.mark.parametrize("name", OF_GENERATION)
def test_a_generations_variables_are_set(name: str, on_gpus: Callable[[str], None]) -> None:
    before = dict(os.environ)
    on_gpus(name)
    xla_flags.apply()
    changed = {n: v for n, v in os.environ.items() if before.get(n) != v}
    del changed["XLA_FLAGS"], changed[xla_flags.OURS]
    assert changed == OF_GENERATION[name]


def test_every_row_has_a_reason_and_a_public_source() -> None:
    for row in TABLE:
        assert row.reason.endswith((".", "struct).")), row.name
        assert re.search(r"\w+/\w+|MaxText", row.source), row.name
        assert row.is_flag == row.name.startswith("xla_"), row.name
        assert row.generation in (None, *xla_flags.GENERATIONS), row.name


@pytest.mark.parametrize(
    ("name", "value", "left"),
    [
        ("NCCL_NVLS_ENABLE", "0", "NCCL_NVLS_ENABLE"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "", "CUDA_DEVICE_MAX_CONNECTIONS"),  # set to nothing
        ("XLA_CLIENT_MEM_FRACTION", ".5", "XLA_CLIENT_MEM_FRACTION"),
        # jax refuses the old name and the new one together
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", ".5", "XLA_CLIENT_MEM_FRACTION"),
    ],
)
def test_the_users_own_variables_win(
    name: str,
    value: str,
    left: str,
    on_gpus: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_gpus("H100 80GB HBM3")
    monkeypatch.setenv(name, value)
    xla_flags.apply()
    assert os.environ[name] == value
    assert left == name or left not in os.environ
    ours = os.environ[xla_flags.OURS].split(",")
    assert left not in ours and "NCCL_DEBUG" in ours
    assert f"{name}={value} (yours)" in xla_flags.of_this_run().split(", ")
    described = xla_flags.describe("gpu", "h100").splitlines()
    (line,) = [line for line in described if line.startswith(f"{left}=")]
    assert f" (left out: you set {name}={value}): " in line


def test_what_an_administrator_set_for_nccl_stays(
    tmp_path: pathlib.Path, on_gpus: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL would let our variable win over its own files."""
    (tmp_path / ".nccl.conf").write_text("# site\nNCCL_NVLS_ENABLE=0\n")
    on_gpus("H100 80GB HBM3")
    assert "NCCL_NVLS_ENABLE" not in xla_flags.additions("gpu", "h100")
    xla_flags.apply()
    assert "NCCL_NVLS_ENABLE" not in os.environ
    assert "NCCL_NVLS_ENABLE=0 (yours)" in xla_flags.of_this_run()
    monkeypatch.setenv("NCCL_CONF_FILE", str(tmp_path / "none"))
    assert xla_flags.additions("gpu", "h100") == SUMS


def test_what_holds_is_one_line(
    on_gpus: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert xla_flags.of_this_run() == ""  # on a CPU
    on_gpus("B200")
    monkeypatch.setenv("XLA_FLAGS", f"--{LIMIT}=1 --xla_gpu_autotune_level=0")
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # no row of this generation
    table = len(xla_flags.flags("gpu", "b200")) - 1
    for _ in range(2):  # a launcher, and a process that inherits what it has set
        xla_flags.apply()
        assert xla_flags.of_this_run() == (
            f"settings: XLA_FLAGS {table} of the table + 2 yours,"
            " CUDA_DEVICE_MAX_CONNECTIONS=1 (yours), NCCL_DEBUG=INFO (yours),"
            " NCCL_IB_HCA=mlx5 (yours), NCCL_NVLS_ENABLE=1,"
            " XLA_CLIENT_MEM_FRACTION=0.9"
        )
    assert (
        xla_flags.describe("gpu", "b200").splitlines()[-1] == "NCCL_IB_HCA=mlx5: yours, passed on"
    )


@pytest.mark.parametrize(("rank", "said"), [("0", True), ("1", False)])
def test_a_run_says_it_once(
    rank: str,
    said: bool,
    on_gpus: Callable[[str], None],
    run_here: RunHere,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JAX_PROCESS_ID", rank)
    on_gpus("H100 80GB HBM3")
    monkeypatch.setattr(train, "prepare_devices", lambda config, **_: None)
    monkeypatch.setattr(train, "train", lambda *_: 0)
    monkeypatch.setattr(launchers, "adopt", lambda: None)
    done = run_here(train.main)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("settings: XLA_FLAGS ") == said
    assert len(done.out.splitlines()) == said


def test_a_shell_can_set_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    users = "--xla_gpu_autotune_level=0"
    words = "-m", "optimus_jax.xla_flags", "--platform=gpu", "--generation=h100", "--export_all"
    lines = run(users, *words).stdout
    shown = subprocess.run(
        ["bash", "-c", f"{lines}\nenv -0"],
        capture_output=True,
        text=True,
        env={"XLA_FLAGS": users, "NCCL_DEBUG": "INFO"},
    )
    assert shown.returncode == 0, shown.stderr
    got = dict(entry.partition("=")[::2] for entry in shown.stdout.split("\0") if entry)
    wanted = OF_GENERATION["H100 80GB HBM3"] | {"NCCL_DEBUG": "INFO"}
    assert {name: got[name] for name in wanted} == wanted
    assert got["XLA_FLAGS"] == xla_flags.merged("gpu", "h100", users)
    words = "-m", "optimus_jax.xla_flags", "--platform=cpu", "--export_all"
    assert run("", *words).stdout == ""


PRINTS = """
import ctypes, os, sys
from optimus_jax import cluster, command
here = sys.argv.pop()
cluster.platform = lambda: here
def main():
    ctypes.CDLL(None).printf(b"NCCL WARN %s\\n", b"odd")  # as NCCL does
    command.emit({})
    sys.stdout.flush()
    os._exit(75)  # as the watchdog does
command.run(main)
"""


@pytest.mark.parametrize(("platform", "said"), [("gpu", ["NCCL WARN odd", "{}"]), ("cpu", ["{}"])])
def test_what_nccl_prints_comes_before_the_json_line(platform: str, said: list[str]) -> None:
    """And is not lost at the end. On a CPU, where nothing is changed, this very program loses it.
    stderr, which may be a log file, is nobody's file to open."""
    buffered = {n: v for n, v in os.environ.items() if n != "PYTHONUNBUFFERED"}
    line = [sys.executable, "-c", PRINTS, platform]
    done = subprocess.run(line, cwd=ROOT, env=buffered, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()) == (75, said), done.stderr
    assert not any("/dev/std" in row.value for row in TABLE)
