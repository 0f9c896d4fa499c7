"""Processes that make a cluster, and variables that do not."""

from __future__ import annotations

import pytest

from optimus_jax import cluster, processes
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
