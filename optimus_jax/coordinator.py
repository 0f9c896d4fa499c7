"""The way to process 0, at which all others meet: its port, proxies, and names that mislead.

jax waits minutes where one of these is wrong, and then aborts the interpreter. Importing this file
does not import jax.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import sys
import time
from collections.abc import MutableMapping

from optimus_jax import launchers
from optimus_jax.errors import UserError
from optimus_jax.processes import ADDRESS, LOCAL_COUNT

BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"  # read by jax itself
_PROXIES = "grpc_proxy", "https_proxy", "http_proxy"
_EXEMPT, _EXEMPT_OF_ALL = "no_grpc_proxy", "no_proxy"
_SILENCE_S = 10.0  # without an answer for so long, waiting is said


def avoid_proxy(host: str, environ: MutableMapping[str, str] | None = None) -> str | None:
    """Lets gRPC, over which jax's processes find each other, reach process 0 at `host` directly:
    through a proxy it waits until time is up, even at 127.0.0.1. Returns in words what was done,
    None if no proxy stands between.

    Only gRPC's own list of exceptions is made longer, so that nothing else changes. gRPC reads
    these variables in lower case alone, and takes no * in the list. Source: grpc/grpc
    src/core/handshaker/http_connect/http_proxy_mapper.cc.
    """
    environ = os.environ if environ is None else environ
    name = next((name for name in _PROXIES if name in environ), None)
    if name is None or not environ[name]:
        return None
    exempt = environ.get(_EXEMPT, environ.get(_EXEMPT_OF_ALL, ""))
    if any(_covers(entry.strip(), host) for entry in exempt.split(",")):
        return None
    environ[_EXEMPT] = ",".join(filter(None, (exempt, host)))
    return (
        f"{name} is set: process 0 at {host} is reached without it ({_EXEMPT}={environ[_EXEMPT]})"
    )


def _covers(entry: str, host: str) -> bool:
    """Whether gRPC takes the entry of a list for this host: an ending of its name, or a subnet."""
    if "/" in entry:
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    return bool(entry) and host.lower().endswith(entry.lower())


def only_here(host: str, count: int) -> str | None:
    """In words, that no other machine can reach process 0 at `host`, an address of this machine
    alone, although the launcher has put some of the `count` processes elsewhere."""
    here = os.environ.get(LOCAL_COUNT, "")
    if not here.isdecimal() or int(here) >= count:
        return None
    try:
        alone = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return None  # a name, which others may know by another address
    which = f"which has {here} of the {count} processes"
    return f"process 0 at {host} can be reached from this machine only, {which}" if alone else None


def require_free(port: int) -> None:
    """Raises UserError if process 0 cannot have its port. jax's own server would share it with
    one of another job, and each would get some of the other's processes. That process 0 ends does
    not keep the rest of this job from the other one: they get an answer at the port, and are with
    it until the launcher ends them."""
    host, _, own = os.environ.get(BIND_ADDRESS, "").rpartition(":")
    port = int(own) if own.isdecimal() else port
    places = [host.strip("[]")] if host else ["0.0.0.0", "::"]
    for place in places:
        family = socket.AF_INET6 if ":" in place else socket.AF_INET
        try:
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((place, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                taken = error.errno == errno.EADDRINUSE
                why = "is taken on this machine, perhaps by another job" if taken else "is reserved"
                raise UserError(
                    f"port {port}, at which process 0 is to be found"
                    f" ({ADDRESS}={os.environ.get(ADDRESS)}), {why}: choose another with"
                    f" {launchers.PORT}, or in {ADDRESS} where you set that, for all processes"
                ) from error


def await_answer(host: str, port: int, seconds: float) -> None:
    """Waits until process 0 answers; without this, jax aborts the interpreter when none does.

    Raises TimeoutError, in words. After 10 s says once that it waits, from one process of each
    machine.
    """
    began = time.monotonic()
    said = not _speaks()
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            waited = time.monotonic() - began
            if waited >= seconds:
                text = f"no answer from process 0 in {seconds} s: {error}{_misled(host)}"
                raise TimeoutError(text) from error
            if not said and waited >= _SILENCE_S:
                said = True
                text = f"no answer yet from process 0 at {host}:{port}, for {seconds} s at most"
                reason = f"{error}{_misled(host)}"  # asks the resolver, so not at every try
                print(f"optimus_jax: {text}: {reason}", file=sys.stderr, flush=True)
        time.sleep(0.05)


def _speaks() -> bool:
    place = launchers.place()
    return place is None or place.local_rank == 0


def loopback(host: str) -> str:
    """The address of this very machine that a host's name stands for here; empty if it stands for
    another one or for nothing."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return ""
    inner = [address for address in found if ipaddress.ip_address(address).is_loopback]
    return sorted(inner)[0] if inner and len(inner) == len(found) else ""


def _misled(host: str) -> str:
    address = loopback(host)
    if not address:
        return ""
    name = host if host == address else f"{host} is {address} here, which"
    return (
        f"; {name} means this machine itself: if process 0 runs on another, give its name or"
        " address in the network (a line of /etc/hosts may say so)"
    )
