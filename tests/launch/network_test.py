"""Several hosts as network namespaces with addresses of their own, joined by a bridge."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from optimus_jax.watchdog import EXIT_CODE, PATIENCE_S
from tests.conftest import ROOT
from tests.train_test import QUICK, TINY, await_step, losses

HOSTS = 4
BRIDGE, PREFIX = "optbr", "opt"
HANG_S = 5.0
pytestmark = pytest.mark.slow


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)


def remove() -> None:
    for n in range(HOSTS):
        ip("netns", "del", f"{PREFIX}{n}")
        ip("link", "del", f"{PREFIX}o{n}")
        shutil.rmtree(f"/etc/netns/{PREFIX}{n}", ignore_errors=True)
    ip("link", "del", BRIDGE)


def skip_without_rights(done: subprocess.CompletedProcess[str]) -> None:
    """Skips where this user or kernel may not do it; anything else that fails is a failure."""
    if re.search(r"not permitted|Permission denied|not supported", done.stderr):
        pytest.skip(f"no right to make network namespaces: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    """The hosts' addresses, each in a namespace of its own."""
    if not shutil.which("ip"):
        pytest.skip("no ip: apt-get install iproute2")
    remove()
    made = ip("link", "add", BRIDGE, "type", "bridge")
    skip_without_rights(made)
    try:
        ip("link", "set", BRIDGE, "up")
        for n in range(HOSTS):
            space, inner, outer = f"{PREFIX}{n}", f"{PREFIX}i{n}", f"{PREFIX}o{n}"
            # gloo listens at the address of the host's own name
            folder = pathlib.Path("/etc/netns", space)
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n10.77.0.{n + 1} {space}\n")
            for line in (
                ("netns", "add", space),
                ("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", space),
                ("link", "set", outer, "master", BRIDGE, "up"),
                ("-n", space, "link", "set", "lo", "up"),
                ("-n", space, "addr", "add", f"10.77.0.{n + 1}/24", "dev", inner),
                ("-n", space, "link", "set", inner, "up"),
            ):
                skip_without_rights(ip(*line))
        yield [f"10.77.0.{n + 1}" for n in range(HOSTS)]
    finally:
        remove()


def start(hosts: list[str], workdir: pathlib.Path, *more: str) -> list[subprocess.Popen[str]]:
    """One process on each host, started as containers are: NNODES, NODE_RANK, MASTER_ADDR."""
    train = [*TINY, f"--config.parallel.pp={HOSTS}", f"--workdir={workdir}", *more]
    common = os.environ | QUICK | {"JAX_PLATFORMS": "cpu", "MASTER_ADDR": hosts[0]}
    named = "unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"'
    return [
        subprocess.Popen(
            ["ip", "netns", "exec", f"{PREFIX}{n}", *named, f"{PREFIX}{n}"]
            + [sys.executable, "-m", "optimus_jax.train", *train],
            cwd=ROOT,
            env=common | {"NNODES": str(HOSTS), "NODE_RANK": str(n)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in range(HOSTS)
    ]


def test_hosts_with_addresses_of_their_own_train(hosts: list[str], tmp_path: pathlib.Path) -> None:
    processes = start(hosts, tmp_path)
    said = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0] * HOSTS, said
    assert len(losses(tmp_path)) == 8


def test_a_host_that_is_cut_off_is_named(hosts: list[str], tmp_path: pathlib.Path) -> None:
    endless = "--config.train.steps=100000", "--config.train.save_every=100000"
    words = *endless, "--config.train.log_every=10", f"--hang_s={HANG_S}"
    processes = start(hosts, tmp_path, *words)
    try:
        await_step(processes[0])
        began = time.monotonic()
        assert ip("link", "set", f"{PREFIX}o2", "down").returncode == 0
        said = [process.communicate(timeout=120)[1] for process in processes]
        assert time.monotonic() - began < HANG_S + PATIENCE_S + 15
    finally:
        ip("link", "set", f"{PREFIX}o2", "up")
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [EXIT_CODE] * HOSTS, said
    assert "process 2 cut off: cannot reach process 0" in "".join(said)
