"""The table of XLA flags and the user's own flags against the installed jaxlib."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

from optimus_jax import cluster, xla_flags, xla_reader
from optimus_jax.errors import UserError
from optimus_jax.gpu import environment
from optimus_jax.gpu_settings import TABLE
from optimus_jax.xla_reader import Word
from tests.conftest import ROOT, RunHere
from tests.gpu.compilers import built

LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"

# Flags that guides and recipes name, tried one by one with jaxlib 0.10.2 and 0.12.0.1.
KNOWN = [
    "xla_gpu_enable_latency_hiding_scheduler=true",
    "xla_gpu_enable_pipelined_p2p=true",
    "xla_gpu_collective_permute_combine_threshold_bytes=1",
    "xla_gpu_enable_triton_gemm=true",
    "xla_gpu_enable_while_loop_double_buffering=true",
    "xla_gpu_autotune_level=4",
    "xla_gpu_enable_analytical_sol_latency_estimator=true",
    "xla_gpu_enable_cublaslt=false",
    "xla_gpu_pgle_profile_file_or_directory_path=",
    "xla_gpu_memory_limit_slop_factor=95",
    "xla_gpu_enable_highest_priority_async_stream=true",
    "xla_gpu_collective_inflation_factor=1",
    "xla_gpu_experimental_stream_annotation=true",
    "xla_gpu_enable_nccl_user_buffers=false",
    "xla_gpu_disable_async_collectives=allreduce",
    "xla_dump_latency_hiding_schedule=false",
    "xla_disable_hlo_passes=none",
    "xla_force_host_platform_device_count=2",
]
UNKNOWN = [
    "xla_gpu_enable_pipelined_collectives",
    "xla_gpu_enable_async_all_reduce",
    "xla_gpu_enable_async_collectives",
    "xla_gpu_lhs_enable_gpu_async_tracker",
    "xla_gpu_enable_triton_softmax_fusion",
    "xla_gpu_enable_priority_fusion",
    "xla_gpu_simplify_all_fp_conversions",
    "xla_gpu_enable_address_computation_fusion",
    "xla_gpu_enable_pgle_accuracy_checker",
    "xla_gpu_enable_scheduling_groups",
]


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    names = {name for row in TABLE if not row.is_flag for name in (row.name, *row.aliases)}
    names |= {name for name in os.environ if name.startswith("NCCL_")}
    for name in (xla_reader.VARIABLE, xla_flags.OURS, *names):
        monkeypatch.setenv(name, "")  # so that what a test sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))  # where NCCL looks for .nccl.conf


def start_jax(flags: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    """A process in which jax starts with these flags."""
    return subprocess.run(
        [python, "-c", "import jax; print(jax.devices())"],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=120,
    )


def run(flags: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "XLA_FLAGS": flags},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("generation", list(xla_flags.GENERATIONS))
def test_every_flag_of_the_table_is_known_and_jax_starts_with_all_of_them(
    generation: str,
) -> None:
    table = xla_flags.flags("gpu", generation)
    assert len(table) >= 8
    assert [f.name for f in table if not xla_reader.known(f.name)] == []
    value = xla_flags.merged("gpu", generation)
    assert value.split() == [str(flag) for flag in table]
    started = start_jax(value)
    assert (started.returncode, "CpuDevice" in started.stdout) == (0, True), started.stderr


def test_the_search_finds_what_jax_knows() -> None:
    """jax names every flag that it does not know; the others must be those found."""
    started = start_jax(" ".join(f"--{word}" for word in [*KNOWN, *UNKNOWN]))
    assert started.returncode
    said = re.findall(r"--(xla_\w+)", started.stderr.partition("Unknown flags in XLA_FLAGS: ")[2])
    assert said == UNKNOWN
    names = [word.partition("=")[0] for word in KNOWN]
    assert [name for name in [*names, UNKNOWN[0]] if xla_reader.known(name)] == names
    assert {*names, *UNKNOWN} & set(xla_reader.names()) == set(names)


def test_cpu_runs_get_no_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cluster.platform() == "cpu"
    xla_flags.apply()
    assert "XLA_FLAGS" not in os.environ
    assert not os.environ.keys() & {row.name for row in TABLE}
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    xla_flags.apply()
    assert os.environ["XLA_FLAGS"] == "--xla_force_host_platform_device_count=2"


def test_the_users_own_flags_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "platform", lambda: "gpu")
    monkeypatch.setattr(cluster, "gpus", lambda: "GPU 0: NVIDIA B200 (UUID: GPU-0)")
    users = f"--{LIMIT}=1 --xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0"
    monkeypatch.setenv("XLA_FLAGS", users)
    xla_flags.apply()
    once = os.environ["XLA_FLAGS"]
    words = once.split()
    names = [word.partition("=")[0] for word in words]
    assert words[:3] == users.split()
    assert "--xla_gpu_enable_latency_hiding_scheduler=true" in words
    assert len(names) == len(set(names))
    xla_flags.apply()  # a launcher's process finds what the launcher has set
    assert os.environ["XLA_FLAGS"] == once
    described = xla_flags.describe("gpu", "b200").splitlines()
    assert len(described) == len(xla_flags.settings("gpu", "b200"))
    (limit,) = [line for line in described if LIMIT in line]
    assert f"--{LIMIT}=16 (left out: you set --{LIMIT}=1): " in limit


def test_values_of_a_generation_and_spellings_of_a_version() -> None:
    buffers = "xla_gpu_enable_command_buffer"

    def value(name: str, generation: str | None, version: tuple[int, ...]) -> str | None:
        rows = xla_flags.flags("gpu", generation, version)
        return {flag.name: flag.value for flag in rows}.get(name)

    assert value(buffers, "h100", (0, 10, 2)) == ""
    assert value(buffers, "b200", (0, 10, 2)) == "FUSION,CUSTOM_CALL"
    assert value(buffers, "a100", (0, 10, 2)) is value(buffers, None, (0, 10, 2)) is None
    old, new = "xla_gpu_enable_pipelined_all_reduce", "xla_gpu_pipeline_all_reduce"
    for version in ((0, 10, 2), (0, 11, 0)):
        assert value(old, None, version) == "true" and value(new, None, version) is None
    for version in ((0, 11, 1), (0, 12, 0, 1)):
        assert value(new, None, version) == "on" and value(old, None, version) is None


def test_generations_by_name() -> None:
    for name, generation in (
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GH200 480GB", "h100"),
        ("NVIDIA H200", "h100"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB300", "b200"),
        ("NVIDIA A10", None),
        ("NVIDIA L40S", None),
    ):
        assert xla_flags.generation(f"GPU 0: {name} (UUID: GPU-0)") == generation, name


def test_what_xla_reads(tmp_path: pathlib.Path) -> None:
    text = """ --a=1  --b --c="x \\"y\\" \\\\" --d='p "q'\n--e= --f=g"h """
    words = [
        Word("a", "1"),
        Word("b", None),
        Word("c", 'x "y" \\'),
        Word("d", 'p "q'),
        Word("e", ""),
        Word("f", 'g"h'),
    ]
    assert xla_reader.parse(text) == words
    assert xla_reader.parse(" ".join(map(str, words))) == words
    file = tmp_path / "flags.txt"
    file.write_text(text)
    assert xla_reader.parse(str(file)) == words
    assert xla_reader.parse("") == []


@pytest.mark.parametrize("text", ["--xla_dump_to=x stray --xla_y", "--a+b=1", "-xla_dump_to=x"])
def test_words_at_which_xla_would_stop_reading(text: str) -> None:
    with pytest.raises(UserError, match="is not a flag"):
        xla_reader.parse(text)


def test_a_file_of_flags_is_merged_or_left_alone(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "flags.txt"
    file.write_text(f"--{LIMIT}=3\n")
    assert xla_flags.merged("cpu", text=str(file)) == str(file)
    assert xla_flags.merged("gpu", text=str(file)).split()[0] == f"--{LIMIT}=3"


def test_wrong_flags_are_refused_in_words_before_jax(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "flags.txt"
    wrong = "--xla_gpu_enable_pipelined_collectives=true --xla_gpu_autotune_level=high"
    file.write_text(f"--xla_gpu_disable_async_collectives=ALLREDUCE {wrong}")
    done = run(wrong, "-m", "optimus_jax.train")
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    unknown, value = done.stderr.splitlines()
    version = re.escape(xla_reader.metadata.version("jaxlib"))
    assert re.fullmatch(
        rf"XLA_FLAGS: jaxlib {version} does not know"
        r" --xla_gpu_enable_pipelined_collectives=true; did you mean"
        r" .*--xla_gpu_enable_pipelined_all_\w+.*\?",
        unknown,
    )
    assert re.fullmatch(
        rf" +XLA_FLAGS: jaxlib {version} cannot read the value of --xla_gpu_autotune_level=high",
        value,
    )
    with pytest.raises(UserError) as refused:
        xla_flags.merged("cpu", text=str(file))
    assert str(refused.value) == done.stderr.rstrip()


def test_a_missing_file_and_the_launcher(tmp_path: pathlib.Path) -> None:
    missing = str(tmp_path / "none.txt")
    done = run(missing, "launch/local.py", "--processes=2", "--", "python", "-c", "print(1)")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"XLA_FLAGS={missing}: No such file or directory;"
        " a value without leading -- names a file of flags\n"
    )


def test_every_command_checks_the_flags(run_here: RunHere, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_disable_loop_unrolling=true")  # an option's name
    done = run_here(lambda: pytest.fail("the command ran"))
    assert done.code == 2
    assert "does not know --xla_cpu_disable_loop_unrolling=true" in done.err
    done = run_here(lambda: 7, runs_here=False)  # as planning, which needs no jax
    assert (done.code, done.err) == (7, "")


def test_flags_are_set_without_importing_jax() -> None:
    code = (
        "import sys; from optimus_jax import cluster, command, xla_flags\n"
        "cluster.platform = lambda: 'gpu'\n"
        "sys.argv = ['x']\n"
        "command.run(lambda: 3 if {'jax', 'jaxlib'} & sys.modules.keys() else 0)"
    )
    done = run("", "-c", code)
    assert done.returncode == 0, done.stderr


def test_a_launch_script_can_ask() -> None:
    done = run("", "-m", "optimus_jax.xla_flags", "--platform=gpu", "--generation=b200", "--export")
    assert done.stdout.split() == [str(flag) for flag in xla_flags.flags("gpu", "b200")]


@pytest.mark.slow
@pytest.mark.parametrize("generation", xla_flags.GENERATIONS)
def test_the_newest_jax_knows_the_table(generation: str) -> None:
    python = str(built(environment.NEWEST).python)
    asked = subprocess.run(
        [python, "-m", "optimus_jax.xla_flags", "--platform=gpu", f"--generation={generation}"]
        + ["--export"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert asked.returncode == 0, asked.stderr
    # None was left out as unknown or unreadable.
    assert len(asked.stdout.split()) == len(xla_flags.flags("gpu", generation, (9,)))
    started = start_jax(asked.stdout.strip(), python)
    assert (started.returncode, "CpuDevice" in started.stdout) == (0, True), started.stderr
