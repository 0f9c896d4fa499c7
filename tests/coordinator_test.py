"""The way to process 0: proxies, a port that is taken, names that mislead."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import jax
import pytest

from optimus_jax import cluster, coordinator, processes
from optimus_jax.errors import UserError
from tests.processes_test import ROOT, VARIABLES, python

DEAD = "http://127.0.0.1:9"  # nothing listens there
NAMES = "grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy"


def address_of_this_machine() -> str:
    """One in the network, if it has one: packets are not sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


@pytest.fixture
def taken() -> Iterator[int]:
    """A port at which something else listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("environment", "exempt"),
    [
        ({"http_proxy": DEAD}, "node1"),
        (
            {"https_proxy": DEAD, "no_proxy": "localhost,.example.org"},
            "localhost,.example.org,node1",
        ),
        ({"grpc_proxy": DEAD, "no_proxy": "*"}, "*,node1"),  # gRPC knows no *
        ({"http_proxy": DEAD, "no_proxy": "node1", "no_grpc_proxy": "x"}, "x,node1"),
        ({"http_proxy": DEAD, "NO_PROXY": "node1"}, "node1"),  # nor capitals
    ],
)
def test_process_0_is_reached_without_a_proxy(environment: dict[str, str], exempt: str) -> None:
    before = dict(environment)
    name = next(n for n in NAMES if n in environment)
    assert coordinator.avoid_proxy("node1", environment) == (
        f"{name} is set: process 0 at node1 is reached without it (no_grpc_proxy={exempt})"
    )
    assert environment == before | {"no_grpc_proxy": exempt}
    assert coordinator.avoid_proxy("node1", environment) is None


@pytest.mark.parametrize(
    ("host", "environment"),
    [
        ("node1", {}),
        ("node1", {"HTTP_PROXY": DEAD, "all_proxy": DEAD}),  # not read by gRPC
        ("node1", {"grpc_proxy": "", "http_proxy": DEAD}),  # the first that is set holds
        ("Node1.Example.org", {"http_proxy": DEAD, "no_proxy": "a, .example.ORG"}),
        ("10.1.2.3", {"http_proxy": DEAD, "no_proxy": "10.0.0.0/8"}),
        ("fd00::2", {"http_proxy": DEAD, "no_proxy": "fd00::/64"}),
    ],
)
def test_no_proxy_stands_between(host: str, environment: dict[str, str]) -> None:
    before = dict(environment)
    assert coordinator.avoid_proxy(host, environment) is None
    assert environment == before


def test_two_processes_meet_although_a_dead_proxy_is_set(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At this machine's address in the network; jax alone aborts when time is up."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", DEAD)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    host = address_of_this_machine()
    program = f"""
        address = os.environ["{processes.ADDRESS}"]
        os.environ["{processes.ADDRESS}"] = "{host}:" + address.rpartition(":")[2]
        del os.environ["{coordinator.BIND_ADDRESS}"]
        from optimus_jax import cluster
        cluster.initialize(timeout_seconds=15)
        import jax
        print(jax.process_count(), flush=True)
    """
    assert processes.run_local(python(program), 2) == 0
    out, err = capfd.readouterr()
    assert out == "2\n"
    said = f"http_proxy is set: process 0 at {host} is reached without it (no_grpc_proxy={host})"
    assert err.splitlines() == [f"optimus_jax: {said}", "[1] 2"]


def test_a_port_that_is_taken_is_words_at_once(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(coordinator.BIND_ADDRESS, raising=False)
    for name, value in zip(VARIABLES, (f"127.0.0.1:{taken}", "2", "0"), strict=True):
        monkeypatch.setenv(name, value)
    # which would end this process with SIGSEGV
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: pytest.fail("jax began"))
    with pytest.raises(UserError) as raised:
        cluster.initialize()
    assert str(raised.value) == (
        f"port {taken}, at which process 0 is to be found (JAX_COORDINATOR_ADDRESS="
        f"127.0.0.1:{taken}), is taken on this machine, perhaps by another job: choose another with"
        " JAX_COORDINATOR_PORT, or in JAX_COORDINATOR_ADDRESS where you set that, for all processes"
    )


def test_a_port_that_another_job_would_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC's servers let others listen beside them."""
    monkeypatch.delenv(coordinator.BIND_ADDRESS, raising=False)
    with socket.socket(socket.AF_INET6) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("::", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port}, .* is taken"):
            coordinator.require_free(port)
    coordinator.require_free(port)


def test_only_the_interface_that_jax_would_listen_at_counts(
    taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(coordinator.BIND_ADDRESS, f"127.0.0.2:{taken}")
    coordinator.require_free(1)
    monkeypatch.setenv(coordinator.BIND_ADDRESS, f"127.0.0.1:{taken}")
    with pytest.raises(UserError, match=f"port {taken}, "):
        coordinator.require_free(1)


@pytest.mark.parametrize(
    ("host", "here", "said"),
    [
        ("localhost", "8", True),
        ("127.0.0.1", "8", True),
        ("::1", "8", True),
        ("127.0.0.1", "16", False),  # all are here
        ("127.0.0.1", "", False),  # nobody says how many are here
        ("node0", "8", False),
        ("192.0.2.7", "8", False),
    ],
)
def test_process_0_says_that_no_other_machine_can_reach_it(
    host: str, here: str, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(processes.LOCAL_COUNT, here)
    note = f"process 0 at {host} can be reached from this machine only, which has 8 of the 16"
    assert coordinator.only_here(host, 16) == (f"{note} processes" if said else None)


@pytest.mark.parametrize("host", ["node0", "127.0.1.1"])
def test_a_name_that_means_this_machine_is_said(
    host: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with the line that Debian writes into /etc/hosts for a machine's own name."""
    known = socket.getaddrinfo

    def resolve(name: str | None, *rest: object, **more: object) -> object:
        return known("127.0.1.1" if name == "node0" else name, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(coordinator, "_SILENCE_S", 0.1)
    with socket.socket() as unused:
        unused.bind(("127.0.1.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(TimeoutError) as raised:
            coordinator.await_answer(host, port, 0.3)
    name = "node0 is 127.0.1.1 here, which" if host == "node0" else host
    hint = f"; {name} means this machine itself: if process 0 runs on another, give its name"
    assert str(raised.value).startswith("no answer from process 0 in 0.3 s: ")
    assert hint in str(raised.value)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"optimus_jax: no answer yet from process 0 at {host}:{port}, ")
    assert hint in line


def test_a_name_of_another_machine_is_no_loopback() -> None:
    assert coordinator.loopback("192.0.2.77") == ""
    assert coordinator.loopback("no-such-host.invalid") == ""
    assert coordinator.loopback("127.0.0.1") == "127.0.0.1"


def test_the_resolver_is_asked_only_for_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at every try: there are 20 in a second, from each process of a job."""
    asked = []
    monkeypatch.setattr(coordinator, "loopback", lambda host: asked.append(host) or "")
    monkeypatch.setattr(coordinator, "_SILENCE_S", 0.1)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(TimeoutError):
            coordinator.await_answer("127.0.0.1", unused.getsockname()[1], 0.5)
    assert len(asked) == 2  # while waiting, and at the end
