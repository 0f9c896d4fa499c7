"""Examples in the README, the pages and the job files: each one's configuration is accepted, and
its processes can share the devices."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import shlex
import subprocess
from collections.abc import Iterator

import pytest
import yaml

from optimus_jax import command
from optimus_jax.config import Config
from optimus_jax.plan.cluster import Cluster
from tests.conftest import ROOT, RunHere

LAUNCH = ROOT / "launch"
PLACES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(LAUNCH.glob("*"))]
GPUS_OF_A_NODE = 8
STARTS = (
    r"python -m optimus_jax\.|sbatch |bash launch/openmpi\.sh|torchrun |python launch/local\.py"
)
STARTS += r"|[\w./]*python -m optimus_jax\."


@dataclasses.dataclass(frozen=True)
class Example:
    """A command of `module` with the words of its configuration, by so many processes, which
    have a GPU each or all `gpus` together; 0 where it names no GPUs."""

    where: str
    module: str
    words: tuple[str, ...]
    processes: int = 1
    gpus: int = 0


def examples() -> Iterator[Example]:
    for path in PLACES:
        if path.is_file() and path.suffix not in (".txt", ".py"):
            for n, text in commands(path):
                if found := example(f"{path.relative_to(ROOT)}:{n}", text):
                    yield found
    yield jobset()


def commands(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """Commands by line number: in backticks, on lines of code, and in comments of job files."""
    text = path.read_text().replace("\\\n", "  ")
    for n, line in enumerate(text.splitlines(), 1):
        parts = [re.sub(r"^#  +", "", line).strip()]  # prose stands right after its #
        if path.suffix == ".md" and not line.startswith("    "):
            parts = re.findall(r"`([^`]+)`", line)
        for part in parts:
            for command_line in re.split(r" && |; |\)\"", part):
                if "[" in command_line:  # a usage
                    continue
                found = re.match(rf"(?:[A-Z]\w+=\S+ )*({STARTS})", command_line)
                if found:
                    yield n, command_line[found.start(1) :]


def example(where: str, text: str) -> Example | None:
    """None for a command that leaves out its options or starts something else."""
    words = shlex.split(text, comments=True)
    own = tuple(w for w in words if w.startswith("--config"))
    module = re.search(r"optimus_jax\.([\w.]+)", text)
    name = module[1] if module else "train"
    if "..." in words:
        return None
    option = {w.partition("=")[0]: w.partition("=")[2] for w in words}
    if words[0] == "sbatch":
        if "launch/slurm.sbatch" not in words:
            return None
        each = int(option.get("--ntasks-per-node", sbatch("ntasks-per-node")))
        nodes = int(option.get("--nodes", sbatch("nodes")))
        after = words[words.index("launch/slurm.sbatch") + 1 :]
        own = own if after else bare_sbatch(nodes * each)
        return Example(where, name, own, nodes * each, nodes * GPUS_OF_A_NODE)
    if words[0] == "torchrun":
        count = int(option["--nnodes"]) * int(option["--nproc-per-node"])
        return Example(where, name, own, count, count)
    if words[1] == "launch/openmpi.sh":
        count = int(words[words.index("-n") + 1]) if words[words.index("-n") + 1] != "N" else 0
        return Example(where, name, own, count, count) if count else None
    if words[1] == "launch/local.py":
        return Example(where, name, own, int(option["--processes"]))
    return Example(where, name, own)


def sbatch(option: str) -> str:
    """What the batch file itself sets."""
    found = re.search(rf"(?m)^#SBATCH --{option}=(\S+)", (LAUNCH / "slurm.sbatch").read_text())
    assert found
    return found[1]


def bare_sbatch(tasks: int) -> tuple[str, ...]:
    """What the batch file trains where nothing stands after its name."""
    lines = (LAUNCH / "slurm.sbatch").read_text().replace("\\\n", " ")
    (line,) = re.findall(r"(?m)^  set -- (.+)$", lines)
    done = subprocess.run(
        ["bash", "-c", f'printf "%s\\n" {line}'],
        env={"SLURM_NTASKS": str(tasks)},
        capture_output=True,
        text=True,
        check=True,
    )
    return tuple(done.stdout.split())


def jobset() -> Example:
    spec = yaml.safe_load((LAUNCH / "k8s" / "jobset.yaml").read_text())["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    own = tuple(w for w in container["args"] if w.startswith("--config"))
    each = container["resources"]["limits"]["nvidia.com/gpu"]
    pods = job["completions"]
    return Example("launch/k8s/jobset.yaml", "train", own, pods, pods * each)


FOUND = list(examples())
CHECKED = [found for found in FOUND if found.words or found.processes > 1]


def test_examples_of_every_kind_are_found() -> None:
    """So that none is left out because it is written in another way."""
    places = {found.where.partition(":")[0] for found in FOUND if found.words}
    shipped = {"README.md", "docs/clusters.md", "launch/slurm.sbatch", "launch/openmpi.sh"}
    assert shipped | {"launch/k8s/jobset.yaml", "docs/tutorial.md"} <= places
    many = {(found.where.partition(":")[0], found.processes) for found in FOUND if found.gpus}
    assert {("docs/clusters.md", 32), ("docs/clusters.md", 16), ("README.md", 32)} <= many
    assert len(FOUND) > 30


def accepted(found: Example, run_here: RunHere) -> Config | Cluster:
    """Its configuration; fails with the complaint in words."""
    made: list[Config | Cluster] = []

    def main() -> int:
        made.append(command.job())
        return 0

    words = list(found.words)
    if not any(w.startswith("--config=") for w in words) and (own := default(found.module)):
        words.append(f"--config={own}")
    done = run_here(main, *words, takes_clusters=found.module == "plan", runs_here=False)
    assert done.code == 0, done.err
    return made[0]


def default(module: str) -> str | None:
    path = ROOT / "optimus_jax" / (module.replace(".", "/") + ".py")
    text = path.read_text() if path.is_file() else ""
    found = re.search(r'define_config\("([^"]+)"\)', text)
    return found[1] if found else None


@pytest.mark.parametrize("found", CHECKED, ids=[f"{e.where} {e.module}" for e in CHECKED])
def test_an_example_is_accepted(found: Example, run_here: RunHere) -> None:
    made = accepted(found, run_here)
    if not isinstance(made, Config):
        return
    devices = made.parallel.devices
    assert devices % found.processes == 0, f"{found.processes} processes, {devices} devices"
    assert not found.gpus or devices == found.gpus, f"{devices} devices of {found.gpus} GPUs"


def test_the_batch_file_alone_is_accepted(run_here: RunHere) -> None:
    for nodes in (1, 2, 5):
        tasks = nodes * int(sbatch("ntasks-per-node"))
        found = Example("bare", "train", bare_sbatch(tasks), tasks, nodes * GPUS_OF_A_NODE)
        test_an_example_is_accepted(found, run_here)


def test_what_the_batch_file_starts(tmp_path: pathlib.Path) -> None:
    """With commands of Slurm that only say what they are given."""
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$JAX_COMPILATION_CACHE_DIR" "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "16",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "OPTIMUS_PYTHON": "/there/python",
    }

    def start(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        line = ["bash", str(LAUNCH / "slurm.sbatch"), *words]
        return subprocess.run(line, env=environment | more, capture_output=True, text=True)

    done = start("--config=x")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no /there/python in" in done.stderr
    inside = "--container-image=registry.example.com#optimus_jax:latest --container-mounts=/a:/a"
    done = start(OPTIMUS_SRUN=inside)
    assert done.returncode == 0, done.stderr
    cache, *words = done.stdout.split()
    assert cache == f"{tmp_path}/.jax_cache"
    at = words.index("/there/python")
    assert words[at - 2 : at] == inside.split()
    assert words[at + 1 :] == ["-u", "-m", "optimus_jax.train", *bare_sbatch(16)]
    done = start("--config=x", OPTIMUS_SRUN=inside, JAX_COMPILATION_CACHE_DIR="/elsewhere")
    assert done.stdout.startswith("/elsewhere ") and done.stdout.endswith("train --config=x\n")
