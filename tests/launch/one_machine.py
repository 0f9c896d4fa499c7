"""A Slurm of two nodes on this machine, for tests of real jobs; skipped where it cannot run."""

from __future__ import annotations

import os
import pathlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest

PROGRAMS = "slurmctld", "slurmd", "munged", "sbatch", "scontrol"
NODES = "n1", "n2"
HOSTS = pathlib.Path("/etc/hosts")


def why_not() -> str | None:
    """Why this machine can have no Slurm of its own, in words."""
    missing = [name for name in PROGRAMS if not _program(name)]
    if missing:
        return f"no {', '.join(missing)}: apt-get install slurm-wlm munge"
    return None if os.geteuid() == 0 else "its daemons need root"


def _program(name: str) -> str | None:
    return shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin:/sbin")


def _run(*line: str) -> None:
    program = _program(line[0]) or line[0]
    done = subprocess.run([program, *line[1:]], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, (line, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Two nodes n1 and n2 with 8 imagined GPUs each; SLURM_CONF names them."""
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm")
    before = HOSTS.read_text()
    HOSTS.write_text(f"{before.rstrip()}\n127.0.0.1 {' '.join(NODES)}\n")
    (folder / "state").mkdir()
    host, ports = socket.gethostname().split(".")[0], _free_ports(4)
    configuration = folder / "slurm.conf"
    configuration.write_text(f"""
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
KillWait=30
SlurmdParameters=config_overrides
ReturnToService=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 Gres=gpu:8 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 Gres=gpu:8 State=UNKNOWN
PartitionName=p Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE
""")
    for n in range(8):
        (folder / f"gpu{n}").touch()
    (folder / "gres.conf").write_text(f"NodeName=n[1-2] Name=gpu File={folder}/gpu[0-7]\n")
    own = not _is_running("munged")
    pytest.MonkeyPatch().setenv("SLURM_CONF", str(configuration))
    try:
        if own:
            _start_munge()
        _run("slurmctld", "-f", str(configuration))
        for node in NODES:
            _run("slurmd", "-N", node, "-f", str(configuration))
        _await_nodes(folder)
        yield
    finally:
        for name in (*(f"slurmd.{node}.pid" for node in NODES), "slurmctld.pid"):
            if (folder / name).is_file():
                subprocess.run(["kill", (folder / name).read_text().strip()], check=False)
        if own:
            subprocess.run(["pkill", "-x", "munged"], check=False)
        HOSTS.write_text(before)


def _start_munge() -> None:
    pathlib.Path("/run/munge").mkdir(exist_ok=True)
    shutil.chown("/run/munge", "munge", "munge")
    if not pathlib.Path("/etc/munge/munge.key").exists():
        _run("mungekey", "-c")
        shutil.chown("/etc/munge/munge.key", "munge", "munge")
    _run("runuser", "-u", "munge", "--", _program("munged") or "munged")


def _is_running(name: str) -> bool:
    return subprocess.run(["pgrep", "-x", name], capture_output=True).returncode == 0


def _await_nodes(folder: pathlib.Path) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        done = subprocess.run(["sinfo", "-h", "-o", "%T"], capture_output=True, text=True)
        if done.stdout.split() == ["idle"]:
            return
        time.sleep(0.5)
    raise AssertionError((folder / "slurmctld.log").read_text()[-3000:])


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports
