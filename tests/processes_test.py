"""The local launcher and the joining of a cluster, with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from optimus_jax import processes
from optimus_jax.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
VARIABLES = (processes.ADDRESS, processes.COUNT, processes.RANK)
WAIT = 60.0


def python(code: str, *arguments: str) -> list[str]:
    """A command for `code`, in which `rank` is the process's number."""
    start = "import os, signal, subprocess, sys, time\nrank = int(os.environ['JAX_PROCESS_ID'])\n"
    return [sys.executable, "-c", start + textwrap.dedent(code), *arguments]


def launch(command: list[str], *options: str) -> subprocess.Popen[str]:
    launcher = [sys.executable, str(ROOT / "launch" / "local.py"), "--processes=2", *options]
    return subprocess.Popen(
        [*launcher, "--", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )


def wait_for(condition, what: str) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, f"no {what} after {WAIT} s"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether the process runs; one that only waits to be reaped does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except ProcessLookupError:
        return False
    except FileNotFoundError:
        return not Path("/proc/self").exists()


def pids_in(folder: Path, count: int) -> list[int]:
    """The pids that `count` processes wrote as names of files in the folder."""
    wait_for(lambda: len(list(folder.iterdir())) == count, f"{count} started processes")
    return [int(path.name) for path in folder.iterdir()]


SLEEP = "open(f'{sys.argv[1]}/{os.getpid()}', 'w').close(); time.sleep(600)"
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP


def test_every_process_gets_its_environment(tmp_path):
    code = """
        import json
        names = [n for n in os.environ if n.startswith(("JAX_", "OPTIMUS_"))]
        json.dump({n: os.environ[n] for n in names}, open(f"{sys.argv[1]}/{rank}", "w"))
    """
    assert processes.run_local(python(code, str(tmp_path)), 3, devices_per_process=4) == 0
    seen = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    assert [env[processes.RANK] for env in seen] == ["0", "1", "2"]
    assert {env[processes.COUNT] for env in seen} == {"3"}
    assert {env[processes.DEVICES] for env in seen} == {"4"}
    (address,) = {env[processes.ADDRESS] for env in seen}
    assert address.startswith("127.0.0.1:")


@pytest.mark.parametrize("own", [None, "glibc.malloc.check=0"])
def test_processes_keep_memory_unless_the_user_says_otherwise(own, tmp_path, monkeypatch):
    monkeypatch.delenv(processes.TUNABLES, raising=False)
    if own:
        monkeypatch.setenv(processes.TUNABLES, own)
    write = f"open(sys.argv[1], 'w').write(os.environ[{processes.TUNABLES!r}])"
    assert processes.run_local(python(write, str(tmp_path / "seen")), 1) == 0
    seen = (tmp_path / "seen").read_text()
    assert seen == own if own else "glibc.malloc.mmap_max=0" in seen.split(":")


def test_stdout_is_that_of_process_0_and_the_others_lose_nothing():
    code = """
        for i in range(2000): print("out", rank, i)
        sys.stderr.write(f"err {rank}\\n")  # at once: print would write it in pieces
        sys.stdout.write(f"last {rank}")
    """
    out, err = (child := launch(python(code))).communicate(timeout=WAIT)
    assert child.returncode == 0
    assert out.splitlines() == [f"out 0 {i}" for i in range(2000)] + ["last 0"]
    relayed = [f"[1] out 1 {i}" for i in range(2000)]
    assert [line for line in err.splitlines() if line.startswith("[1] out")] == relayed
    assert set(err.splitlines()) - set(relayed) == {"[1] err 1", "[1] last 1", "err 0"}


def test_log_dir_keeps_every_processes_output(tmp_path, capfd):
    code = "print('hello', rank, flush=True)\nprint('so', rank, file=sys.stderr, flush=True)"
    assert processes.run_local(python(code), 3, log_dir=tmp_path / "logs") == 0
    logs = {path.name: set(path.read_text().splitlines()) for path in tmp_path.glob("logs/*")}
    assert logs == {f"process_{rank}.log": {f"hello {rank}", f"so {rank}"} for rank in range(3)}
    out, err = capfd.readouterr()
    assert out == "hello 0\n"
    assert sorted(err.splitlines()) == [
        "[1] hello 1",
        "[1] so 1",
        "[2] hello 2",
        "[2] so 2",
        "so 0",
    ]


def test_the_launcher_keeps_logs_where_it_is_told(tmp_path, monkeypatch):
    code = "print(rank, os.environ.get('OPTIMUS_TIMESTAMPS'))"
    monkeypatch.delenv("OPTIMUS_TIMESTAMPS", raising=False)
    monkeypatch.setenv("OPTIMUS_LOGS", str(tmp_path))
    assert launch(python(code)).communicate(timeout=WAIT) == ("0 1\n", "[1] 1 1\n")
    monkeypatch.setenv("OPTIMUS_TIMESTAMPS", "")
    assert launch(python(code)).communicate(timeout=WAIT) == ("0 \n", "[1] 1 \n")
    first, second = sorted(tmp_path.iterdir(), key=lambda folder: folder.stat().st_mtime_ns)
    logs = {path.name: path.read_text() for path in first.iterdir()}
    assert logs == {"process_0.log": "0 1\n", "process_1.log": "1 1\n"}
    assert (second / "process_0.log").read_text() == "0 \n"


def test_logs_that_cannot_be_written_are_words(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("OPTIMUS_LOGS", str(tmp_path / "file"))
    child = launch(python("print('never')"))
    assert child.communicate(timeout=WAIT)[0] == ""
    assert child.returncode == 2
    with pytest.raises(UserError) as raised:
        processes.run_local(python("print('never')"), 1, log_dir=tmp_path / "file" / "logs")
    assert str(raised.value).startswith(f"logs cannot be written to {tmp_path}/file/logs: ")
    assert str(raised.value).endswith(": Not a directory")


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("sys.exit(3)", 3, "process 1 of 3 failed with code 3;"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "process 1 of 3 failed with code 137 (SIG"),
        ("raise ValueError('odd')", 1, "[1] ValueError: odd\noptimus_jax: process 1 of 3 failed"),
    ],
)
def test_a_failure_stops_the_others_and_is_returned(end, code, said, capfd):
    started = time.monotonic()
    command = python(f"if rank == 1:\n    {end}\ntime.sleep(600)")
    assert processes.run_local(command, 3) == code
    assert time.monotonic() - started < processes.GRACE_SECONDS
    assert said in capfd.readouterr().err


def test_what_ignores_sigterm_after_a_failure_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.5)
    code = f"""
        if rank == 1:
            while not os.listdir(sys.argv[1]): time.sleep(0.01)
            sys.exit(4)
        {STUBBORN.replace(chr(10), chr(10) + " " * 8)}
    """
    assert processes.run_local(python(code, str(tmp_path)), 2) == 4
    assert not any(alive(pid) for pid in pids_in(tmp_path, 1))


def test_a_command_that_does_not_exist(capfd):
    assert processes.run_local(["no-such-command"], 1) == 127
    assert "cannot run no-such-command: No such file or directory" in capfd.readouterr().err


@pytest.mark.parametrize(("number", "code_of_0"), [(signal.SIGTERM, 5), (signal.SIGINT, 0)])
def test_a_signal_reaches_every_process_once(number, code_of_0, tmp_path):
    code = f"""
        received = []
        signal.signal({number:d}, lambda n, _: received.append(n))
        open(f'{{sys.argv[1]}}/{{os.getpid()}}', 'w').close()
        while not received: time.sleep(0.01)
        time.sleep(0.3 * rank)
        print("received", received, flush=True)
        sys.exit(0 if rank else {code_of_0})
    """
    child = launch(python(code, str(tmp_path)))
    pids = pids_in(tmp_path, 2)
    child.send_signal(number)
    out, err = child.communicate(timeout=WAIT)
    assert child.returncode == code_of_0
    assert out == f"received [{number:d}]\n"
    assert f"[1] received [{number:d}]" in err.splitlines()
    assert not any(alive(pid) for pid in pids)


def test_sigterm_leaves_no_orphans(tmp_path):
    child = launch(python(SLEEP, str(tmp_path)))
    pids = pids_in(tmp_path, 2)
    child.terminate()
    _, err = child.communicate(timeout=WAIT)
    assert child.returncode == 128 + signal.SIGTERM
    assert "failed with code 143 (SIGTERM)" in err
    assert not any(alive(pid) for pid in pids)


def test_a_second_signal_kills(tmp_path):
    child = launch(python(STUBBORN, str(tmp_path)))
    pids = pids_in(tmp_path, 2)
    child.terminate()
    time.sleep(0.3)
    assert all(alive(pid) for pid in pids)
    child.terminate()
    child.communicate(timeout=WAIT)
    assert child.returncode == 128 + signal.SIGKILL
    assert not any(alive(pid) for pid in pids)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
def test_a_killed_launcher_leaves_no_orphans(tmp_path):
    child = launch(python(STUBBORN, str(tmp_path)))
    pids = pids_in(tmp_path, 2)
    child.kill()
    child.communicate(timeout=WAIT)
    wait_for(lambda: not any(alive(pid) for pid in pids), "end of the processes")


def test_children_of_a_finished_process_are_ended(tmp_path):
    code = """
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        open(f"{sys.argv[1]}/{subprocess.Popen(command).pid}", "w").close()
    """
    assert processes.run_local(python(code, str(tmp_path)), 2) == 0
    pids = pids_in(tmp_path, 2)
    wait_for(lambda: not any(alive(pid) for pid in pids), "end of the processes' children")


CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@pytest.mark.skipif(len(CORES) < 2, reason="two processes cannot be pinned to one core")
def test_pinning():
    cores = CORES
    code = "print(sorted(os.sched_getaffinity(0)))"
    pinned = launch(python(code)).communicate(timeout=WAIT)
    assert pinned == (f"[{cores[0]}]\n", f"[1] [{cores[1]}]\n")
    assert launch(python(code), "--no-pin").communicate()[0] == f"{cores}\n"


@pytest.mark.parametrize(
    "arguments",
    ["", "--processes=2", "--processes=2 --", "--processes=0 -- a", "-- a", "--processes=x -- a"]
    + ["--processes=2 --fast -- a", "--processes=2 a"],
)
def test_wrong_usage_of_the_launcher(arguments):
    command = [sys.executable, str(ROOT / "launch" / "local.py"), *arguments.split()]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("usage: python launch/local.py --processes=N")


def test_the_launcher_finds_the_package_from_any_folder_and_needs_no_jax(tmp_path):
    code = "import optimus_jax.cluster, sys; print(sys.executable, 'jax' in sys.modules)"
    launcher = [sys.executable, str(ROOT / "launch" / "local.py"), "--processes=1", "--"]
    result = subprocess.run(
        [*launcher, "python", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert result.stdout == f"{sys.executable} False\n"
