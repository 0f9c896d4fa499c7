"""The shipped job files: what Slurm, Open MPI and Kubernetes would take."""

from __future__ import annotations

import itertools
import pathlib
import re
import subprocess
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT

LAUNCH = ROOT / "launch"
JOBSET = yaml.safe_load((LAUNCH / "k8s" / "jobset.yaml").read_text())

# Fields of a JobSet of version v1alpha2 that is not a Job's (kubernetes-sigs/jobset,
# api/jobset/v1alpha2/jobset_types.go): what each may hold, required ones with *.
Field = Any
SPEC: dict[str, Field] = {
    "*replicatedJobs": [
        {
            "*name": str,
            "replicas": int,
            "groupName": str,
            "dependsOn": list,
            "*template": dict,
        }
    ],
    "network": {
        "enableDNSHostnames": bool,
        "subdomain": str,
        "publishNotReadyAddresses": bool,
    },
    "successPolicy": dict,
    "failurePolicy": {
        "maxRestarts": int,
        "rules": list,
        "restartStrategy": ("Recreate", "BlockingRecreate", "InPlaceRestart"),
    },
    "coordinator": {"*replicatedJob": str, "jobIndex": int, "podIndex": int},
    "startupPolicy": dict,
    "suspend": bool,
    "managedBy": str,
    "ttlSecondsAfterFinished": int,
    "volumeClaimPolicies": list,
}


def wrong(value: Any, field: Field, path: str = "spec") -> list[str]:
    """Where a value is not what a field may hold."""
    if isinstance(field, type):
        return [] if type(value) is field else [f"{path}: {value!r} is no {field.__name__}"]
    if isinstance(field, tuple):
        return [] if value in field else [f"{path}: {value!r} is none of {field}"]
    if isinstance(field, list):
        return [x for n, item in enumerate(value) for x in wrong(item, field[0], f"{path}[{n}]")]
    if not isinstance(value, Mapping):
        return [f"{path}: {value!r} holds no fields"]
    required = {name[1:] for name in field if name.startswith("*")}
    known = {name.lstrip("*"): of for name, of in field.items()}
    found = [f"{path}.{name}: missing" for name in sorted(required - value.keys())]
    found += [f"{path}.{name}: unknown" for name in sorted(value.keys() - known.keys())]
    for name in sorted(value.keys() & known.keys()):
        found += wrong(value[name], known[name], f"{path}.{name}")
    return found


def test_the_jobset_passes_its_schema() -> None:
    assert (JOBSET["apiVersion"], JOBSET["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert wrong(JOBSET["spec"], SPEC) == []
    bad = {**JOBSET["spec"], "network": {"enableDnsHostnames": True}, "suspend": "no"}
    assert wrong(bad, SPEC) == [
        "spec.network.enableDnsHostnames: unknown",
        "spec.suspend: 'no' is no bool",
    ]


def test_its_job_passes_the_schema_of_kubernetes() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    (job,) = JOBSET["spec"]["replicatedJobs"]
    whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}}
    kubernetes_validate.validate(whole | job["template"], "1.31", strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        broken = {"spec": {**job["template"]["spec"], "completion": 2}}
        kubernetes_validate.validate(whole | broken, "1.31", strict=True)


def test_a_jobset_names_its_nodes_once() -> None:
    (job,) = JOBSET["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    values = {e["name"]: e.get("value") for e in container["env"]}
    assert spec["parallelism"] == spec["completions"] == int(values["NNODES"])
    assert JOBSET["spec"]["coordinator"]["replicatedJob"] == job["name"]


@pytest.mark.parametrize("name", ["slurm.sbatch", "openmpi.sh", "setup.sh", "quickstart.sh"])
def test_scripts_are_sound_shell(name: str) -> None:
    done = subprocess.run(["bash", "-n", str(LAUNCH / name)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_options_of_the_batch_script_are_slurms_own() -> None:
    """Those of `man sbatch`; a real Slurm is asked in tests/launch/slurm_test.py."""
    text = (LAUNCH / "slurm.sbatch").read_text()
    options = re.findall(r"^#SBATCH --([a-z-]+)", text, re.MULTILINE)
    assert {"nodes", "ntasks-per-node", "gpus-per-node", "requeue", "signal"} <= set(options)
    lines = text.splitlines()
    first = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(not line.startswith("#SBATCH") for line in lines[first:]), "Slurm would not see it"


def test_open_mpi_wants_its_options_apart() -> None:
    script = ["bash", str(LAUNCH / "openmpi.sh")]
    for words in ([], ["-n", "2"], ["--", "--config=x"]):
        done = subprocess.run([*script, *words], capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.startswith("usage: ")


def fake_mpirun(folder: pathlib.Path) -> None:
    """An mpirun that only says what it was given."""
    fake = folder / "mpirun"
    fake.write_text(
        '#!/bin/sh\necho "$JAX_COORDINATOR_ADDRESS" "$@"\necho "$JAX_COMPILATION_CACHE_DIR" >&2\n'
    )
    fake.chmod(0o755)


def test_the_first_host_is_the_coordinators(tmp_path: pathlib.Path) -> None:
    fake_mpirun(tmp_path)
    (tmp_path / "hosts").write_text("# two\n\nnode7 slots=2\nnode8 slots=2\n")
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "JAX_COORDINATOR_PORT": "61999",
    }
    script = ["bash", str(LAUNCH / "openmpi.sh"), "-n", "4"]
    for words, first in (
        (["--hostfile", str(tmp_path / "hosts")], "node7"),
        (["--host", "a:2,b:2"], "a"),
        ([], "127.0.0.1"),
    ):
        done = subprocess.run(
            [*script, *words, "--", "--config=x"], capture_output=True, text=True, env=environment
        )
        assert done.stdout.startswith(f"{first}:61999 --bind-to none"), done.stderr
        assert done.stdout.rstrip().endswith("-m optimus_jax.train --config=x")


def test_open_mpi_hands_on_what_the_user_set_and_keeps_logs(tmp_path: pathlib.Path) -> None:
    fake_mpirun(tmp_path)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "NCCL_IB_HCA": "mlx5", "NCCL_DEBUG": "WARN"}
    script = ["bash", str(LAUNCH / "openmpi.sh"), "-n", "4"]

    def words(*options: str, **more: str) -> list[str]:
        done = subprocess.run(
            [*script, *options, "--", "--config=x"],
            capture_output=True,
            text=True,
            env=environment | more,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    def after(given: list[str], option: str) -> list[str]:
        return [b for a, b in itertools.pairwise(given) if a == option]

    given = words("-x", "NCCL_DEBUG=INFO")
    exported = after(given, "-x")
    assert sorted(exported) == sorted(
        ["JAX_COMPILATION_CACHE_DIR", "JAX_COORDINATOR_ADDRESS"]
        + ["NCCL_DEBUG=INFO", "NCCL_IB_HCA", "OPTIMUS_TIMESTAMPS"]
    )
    (logs,) = after(given, "--output-filename")
    assert re.fullmatch(rf"{tmp_path}/logs/openmpi-\d{{8}}-\d{{6}}-\d+:nojobid", logs)
    (logs,) = after(words(OPTIMUS_LOGS="/elsewhere"), "--output-filename")
    assert logs.startswith("/elsewhere/openmpi-")
    assert after(words("--output-filename", "own"), "--output-filename") == ["own"]


def test_compiled_programs_are_kept(tmp_path: pathlib.Path) -> None:
    """Of slurm.sbatch see examples_test.py."""
    fake_mpirun(tmp_path)
    script = ["bash", str(LAUNCH / "openmpi.sh"), "-n", "4", "--", "--config=x"]
    for own, kept in ({}, f"{tmp_path}/.jax_cache"), ({"JAX_COMPILATION_CACHE_DIR": "/a"}, "/a"):
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", **own}
        done = subprocess.run(script, capture_output=True, text=True, env=environment, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, f"{kept}\n")
    (job,) = JOBSET["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    values = {e["name"]: e.get("value") for e in container["env"]}
    claim = next(m["mountPath"] for m in container["volumeMounts"] if m["name"] == "runs")
    assert values["JAX_COMPILATION_CACHE_DIR"] == f"{claim}/jax_cache"
