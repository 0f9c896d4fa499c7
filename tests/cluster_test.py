"""Processes that make a cluster, and variables that do not."""

from __future__ import annotations

import pytest

from optimus_jax import cluster, launchers, processes, xla_flags
from optimus_jax.errors import UserError
from tests.processes_test import ROOT, VARIABLES, python


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("h:1", None, None), "JAX_COORDINATOR_ADDRESS set but not JAX_NUM_PROCESSES and JAX_PR"),
        (("h:1", "2", None), "set but not JAX_PROCESS_ID: set all three or none"),
        ((None, "2", "0"), "set but not JAX_COORDINATOR_ADDRESS:"),
        (("h:1", "two", "0"), "JAX_NUM_PROCESSES=two is not a whole number"),
        (("h:1", "2", "2"), "JAX_PROCESS_ID=2 is not one of 0 to JAX_NUM_PROCESSES-1"),
        (("h", "2", "1"), "JAX_COORDINATOR_ADDRESS=h is not HOST:PORT"),
    ],
)
def test_variables_that_make_no_cluster(values, message, monkeypatch):
    for name, value in zip(VARIABLES, values, strict=True):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as raised:
        cluster.initialize()
    assert message in str(raised.value)


def test_one_process_needs_no_variables(monkeypatch):
    for name in (*VARIABLES, processes.DEVICES):
        monkeypatch.delenv(name, raising=False)
    cluster.initialize()


def test_a_coordinator_that_does_not_answer(monkeypatch):
    with processes.socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        for name, value in zip(VARIABLES, (address, "2", "1"), strict=True):
            monkeypatch.setenv(name, value)
        with pytest.raises(UserError) as raised:
            cluster.initialize(timeout_seconds=0)
    text = str(raised.value)
    assert "\n" not in text
    assert text.startswith(f"cannot join the cluster of JAX_COORDINATOR_ADDRESS={address}, ")
    assert "no answer from process 0" in text


@pytest.mark.parametrize(("end", "code"), [("", 0), ("if rank: raise ValueError('odd')", 1)])
def test_two_processes_of_two_devices_add_up(end, code, capfd, monkeypatch):
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.5)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    program = f"""
        from optimus_jax import cluster
        cluster.initialize()
        import jax, jax.numpy as jnp
        from jax.sharding import NamedSharding, PartitionSpec as P
        mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        where = NamedSharding(mesh, P("x"))
        numbers = jax.make_array_from_callback((4,), where, lambda i: jnp.arange(1.0, 5.0)[i])
        def add(v): return jax.lax.psum(v, "x")
        total = jax.jit(jax.shard_map(add, mesh=mesh, in_specs=P("x"), out_specs=P()))(numbers)
        value = total.addressable_data(0).item()
        print(jax.process_count(), len(jax.local_devices()), value, flush=True)
        {end}
        if {code}: time.sleep(600)
    """
    assert processes.run_local(python(program), 2, devices_per_process=2) == code
    out, err = capfd.readouterr()
    assert out.splitlines()[-1] == "2 2 10.0"
    assert "[1] 2 2 10.0" in err.splitlines()
    assert ("[1] ValueError: odd" in err.splitlines()) == bool(code)


GPUS = "".join(f"GPU {n}: NVIDIA H100 80GB HBM3 (UUID: GPU-{n})\n" for n in range(8))
EACH = {"OPTIMUS_LOCAL_RANK": "3", "OPTIMUS_LOCAL_COUNT": "8"}


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        (EACH, [3]),  # each takes its own of all that it sees
        ({**EACH, "CUDA_VISIBLE_DEVICES": "5"}, [0]),  # bound to one
        ({"OPTIMUS_LOCAL_RANK": "0", "OPTIMUS_LOCAL_COUNT": "1"}, None),  # alone: all
        ({**EACH, "JAX_LOCAL_DEVICE_IDS": "0,1"}, None),  # jax reads them itself
    ],
)
def test_which_gpus_a_process_takes(environment, wanted, monkeypatch):
    gpu_process(monkeypatch, environment)
    assert cluster.local_devices() == wanted


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (
            {"CUDA_VISIBLE_DEVICES": "0", "SLURM_GPUS_ON_NODE": "8"},
            "the job has 8 GPUs on this machine, its only process sees 1",
        ),
        (
            {**EACH, "CUDA_VISIBLE_DEVICES": "0,1,2,3"},
            "this machine shows 4 GPUs to 8 processes: start 4 processes",
        ),
    ],
)
def test_gpus_that_do_not_fit_the_processes_are_words(environment, words, monkeypatch):
    gpu_process(monkeypatch, environment)
    with pytest.raises(UserError, match=words):
        cluster.local_devices()


def gpu_process(monkeypatch, environment):
    """Process 3 of 16, on a machine of 8 GPUs."""
    names = "SLURM_GPUS_ON_NODE", "CUDA_VISIBLE_DEVICES", "JAX_LOCAL_DEVICE_IDS"
    for name in (*names, "OPTIMUS_LOCAL_RANK", "OPTIMUS_LOCAL_COUNT"):
        monkeypatch.delenv(name, raising=False)
    values = dict(zip(VARIABLES, ("h:1", "16", "3"), strict=True)) | environment
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cluster, "platform", lambda: "gpu")
    monkeypatch.setattr(cluster, "gpus", lambda: GPUS)


def machine_without_plugin(monkeypatch, environment, gpus=GPUS):
    """Where nvidia-smi lists 8 GPUs and jax is the CPU's."""
    for name in ("JAX_PLATFORMS", "SLURM_GPUS_ON_NODE", *VARIABLES):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cluster, "gpus", lambda: gpus)
    monkeypatch.setattr(cluster, "_has_cuda_plugin", lambda: False)


MISSING = "8 GPUs here, but jax has no CUDA plugin"


@pytest.mark.parametrize(
    ("environment", "err"),
    [
        ({}, f"{MISSING}: this runs on the CPU; bash launch/setup.sh --cuda installs it, "),
        ({"SLURM_GPUS_ON_NODE": "0"}, MISSING),
        ({"JAX_PROCESS_ID": "1"}, ""),  # process 0 speaks
        ({"JAX_PLATFORMS": "cpu", "SLURM_GPUS_ON_NODE": "8"}, ""),
        ({"JAX_PLATFORMS": "cuda"}, MISSING),
    ],
)
def test_gpus_that_jax_cannot_use_are_said(environment, err, monkeypatch, run_here):
    machine_without_plugin(monkeypatch, environment)
    monkeypatch.setattr(launchers, "adopt", lambda: None)
    monkeypatch.setattr(xla_flags, "apply", lambda: None)
    done = run_here(lambda: 0)
    assert (done.code, done.out) == (0, "")
    assert done.err.startswith(err) and len(done.err.splitlines()) == bool(err)


def test_a_job_that_was_given_gpus_does_not_train_on_cpus(monkeypatch, run_here):
    machine_without_plugin(monkeypatch, {"SLURM_GPUS_ON_NODE": "4"})
    done = run_here(lambda: pytest.fail("it ran"))
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"{MISSING}, and the job was given 4: bash launch/setup.sh --cuda")
    done = run_here(lambda: 0, runs_here=False)  # as plan, which runs nothing
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize(("plugin", "gpus"), [(True, GPUS), (False, "")])
def test_nothing_is_said_where_all_is_well(plugin, gpus, monkeypatch):
    machine_without_plugin(monkeypatch, {"SLURM_GPUS_ON_NODE": "8"}, gpus)
    monkeypatch.setattr(cluster, "_has_cuda_plugin", lambda: plugin)
    assert cluster.missing_cuda() is None
