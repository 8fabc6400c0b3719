"""TCP between every two nodes: a port answers, and a payload larger than any MTU comes back."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from elastic.clock import SYSTEM_CLOCK
from elastic.doctor.findings import Finding, failed, ok
from elastic.tuning.doctor_intervals import DOCTOR_PAIR_CONNECT_S, DOCTOR_SERVER_TURN_S

PAYLOAD_BYTES = 64 << 10
_MAX_NAMED = 4


@dataclass(frozen=True, kw_only=True)
class ConnectionAttempt:
    """One attempt from this node to a port of another one."""

    to: int  # the other node's number
    address: str
    port: int
    took_ms: float
    error: str


@dataclass(frozen=True, kw_only=True)
class BoundPorts:
    """The ports that a node serves, and ports that it could not bind, with the reason."""

    ports: tuple[int, ...]
    errors: tuple[str, ...]


class _Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        stream: socket.socket = self.request
        stream.settimeout(DOCTOR_PAIR_CONNECT_S)
        with contextlib.suppress(OSError):  # the other node reports it
            stream.sendall(_receive(stream))


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128


class _ServerV6(_Server):
    address_family = socket.AF_INET6


@contextlib.contextmanager
def listening(address: str, wanted: Sequence[int]) -> Iterator[BoundPorts]:
    """Serve an ephemeral port and the requested ones, within the block."""
    kind = _ServerV6 if ":" in address else _Server
    servers, errors = [], []
    for port in (0, *wanted):
        try:
            servers.append(kind((address, port), _Echo))
        except OSError as error:
            errors.append(f"port {port}: {error.strerror}")
    threads = [
        threading.Thread(
            target=s.serve_forever,
            args=(DOCTOR_SERVER_TURN_S,),
            name=f"elastic-doctor-port-{s.server_address[1]}",
        )
        for s in servers
    ]
    for thread in threads:
        thread.start()
    try:
        ports = tuple(int(server.server_address[1]) for server in servers)
        yield BoundPorts(ports=ports, errors=tuple(errors))
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
        for thread in threads:
            thread.join()


def connect_to_all(targets: Sequence[tuple[int, str, int]]) -> list[ConnectionAttempt]:
    """Connect to all ``targets`` (number, address, port) at once, because timeouts take long."""
    if not targets:
        return []
    with ThreadPoolExecutor(min(len(targets), 64), "elastic-doctor-connect") as pool:
        return list(pool.map(lambda target: _connect(*target), targets))


def _connect(to: int, address: str, port: int) -> ConnectionAttempt:
    began = SYSTEM_CLOCK.monotonic()
    problem, took_ms = "", 0.0
    try:
        with socket.create_connection((address, port), timeout=DOCTOR_PAIR_CONNECT_S) as stream:
            took_ms = 1000 * (SYSTEM_CLOCK.monotonic() - began)
            stream.sendall(bytes(PAYLOAD_BYTES))
            _receive(stream)
    except TimeoutError:
        answers = f"connects, but {PAYLOAD_BYTES >> 10} KiB do not come back" if took_ms else ""
        problem = answers or f"no answer within {DOCTOR_PAIR_CONNECT_S:g} s"
    except OSError as error:
        problem = error.strerror or str(error)
    return ConnectionAttempt(to=to, address=address, port=port, took_ms=took_ms, error=problem)


def _receive(stream: socket.socket) -> bytes:
    received = bytearray()
    while len(received) < PAYLOAD_BYTES:
        part = stream.recv(PAYLOAD_BYTES)
        if not part:
            raise ConnectionResetError("closed by the other node")
        received += part
    return bytes(received)


def connection_error(address: str, port: int, within_s: float) -> OSError | None:
    """The error of a connection to a port; None if it succeeds."""
    try:
        socket.create_connection((address, port), timeout=within_s).close()
    except OSError as error:
        return error
    return None


def findings(names: Sequence[str], attempts: dict[int, list[Any]]) -> list[Finding]:
    """``attempts``: number of a node → its :class:`ConnectionAttempt`, as dictionaries.

    One finding per failing pair; all reachable nodes share one.
    """
    found: list[Finding] = []
    for number, raw in sorted(attempts.items()):
        tried = [ConnectionAttempt(**one) for one in raw]
        broken = sorted({one.to for one in tried if one.error})
        well = [one for one in tried if one.to not in broken]
        if well:
            found.append(_of_reached(names, number, well))
        found += [
            _of_broken(names[number], names[to], [t for t in tried if t.to == to and t.error])
            for to in broken
        ]
    return found


def _of_reached(names: Sequence[str], number: int, tried: Sequence[ConnectionAttempt]) -> Finding:
    targets = [names[to] for to in sorted({one.to for one in tried})]
    shown = ", ".join(targets) if len(targets) <= _MAX_NAMED else f"{len(targets)} nodes"
    slowest = max(one.took_ms for one in tried)
    return ok(
        f"TCP {names[number]} → {shown}",
        f"{len(tried)} ports answer, connected in at most {slowest:.1f} ms",
    )


def _of_broken(source: str, target: str, broken: Sequence[ConnectionAttempt]) -> Finding:
    measured = "; ".join(f"{one.address}:{one.port}: {one.error}" for one in broken)
    if any("do not come back" in one.error for one in broken):
        remedy = (
            "large packets are lost: use the same MTU on every interface and switch between them"
        )
    elif any("no answer" in one.error for one in broken):
        remedy = (
            "a firewall drops packets: open all TCP ports between the nodes, in both directions"
        )
    else:
        remedy = "check the node's address (--local-addr) and its firewall"
    return failed(f"TCP {source} → {target}", measured, remedy)


def as_values(attempts: Sequence[ConnectionAttempt]) -> list[dict[str, Any]]:
    return [asdict(one) for one in attempts]
