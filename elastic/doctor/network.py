"""Checks between nodes: reachability, bandwidth, and the checks before a node joins."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import json
import os
import socket
import socketserver
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from elastic.doctor import checks
from elastic.doctor.checks import Finding, Probe, Status, failed, ok, skipped, warning
from elastic.errors import SYSTEM_CLOCK, CoordinationError, NodeUnfit
from elastic.membership.records import Keys, Leader, Node, decode
from elastic.store.client import Endpoint
from elastic.store.keyvalue import KeyValue
from elastic.tuning.network import LOOPBACK, Network, configured_address, interface_towards
from elastic.tuning.options import AgentOptions

# The servers of the checks between nodes check this often whether to end.
DOCTOR_SERVER_TURN_S = 0.05
# A TCP connection to a port of another node: three SYN packets (at 0, 1 and 3 s) on a lossy
# network.
DOCTOR_PAIR_CONNECT_S = 3.0
# Data is sent to each address of another node for this long: enough for TCP to reach its speed.
DOCTOR_BANDWIDTH_S = 0.3
# The probes of the preflight, which an agent runs before it joins, while it starts.
PREFLIGHT_PROBES_S = 10.0
# A connection of the preflight to a port of the leader: one repeated SYN.
PREFLIGHT_CONNECT_S = 1.5

# ----------------------------------------------------------------------------
# The part of the preflight that a worker can request: ``elastic.join(preflight=True)``.
#
# Runs in a separate process (:mod:`elastic.worker.node_first` starts it): workers import neither
# the doctor nor etcd's client. Checks that need etcd or the agent's address are the agent's part
# .


def examine(folder: str | None, *, machine_is_checked: bool) -> list[Finding]:
    """Run the checks. ``folder``: for checkpoints. ``machine_is_checked``: by the agent."""
    gpu = folder_probe = None
    if not machine_is_checked and checks.has_gpu_driver():
        gpu = Probe("gpu", (), deadline_s=PREFLIGHT_PROBES_S)
    if folder is not None:
        place = _existing(folder)
        folder_probe = Probe("folder", (place,), deadline_s=PREFLIGHT_PROBES_S)
    findings: list[Finding] = []
    if not machine_is_checked:
        findings += [
            checks.of_shm(checks.shm()),
            *checks.of_limits(checks.limits()),
            *(checks.of_gpu(gpu.result()) if gpu else [skipped("GPU", "no GPU")]),
        ]
    if folder_probe is not None and folder is not None:
        findings += checks.of_folder(folder, folder_probe.result())
    return findings


def _existing(folder: str) -> str:
    """The folder, or its nearest existing parent."""
    path = Path(folder).absolute()
    return str(next((p for p in (path, *path.parents) if p.exists()), path))


def main(arguments: Sequence[str] | None = None) -> None:
    """In the child process: a JSON list of findings on stdout."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--folder")
    parser.add_argument("--machine-is-checked", action="store_true")
    options = parser.parse_args(arguments)
    checks.die_with_parent(options.parent)
    findings = examine(options.folder, machine_is_checked=options.machine_is_checked)
    os.write(1, json.dumps([asdict(finding) for finding in findings]).encode())


if __name__ == "__main__":
    main()


# ----------------------------------------------------------------------------
# Bandwidth of the paths between two nodes: a job uses one address per node, perhaps a slow one.
#
# Every node sends briefly to each address of the next one, over the interface that the kernel
# selects. No two measurements share a node.

NAME = "bandwidth"
_CHUNK_BYTES = 256 << 10
# The kernel's send buffer: a slow link still has to send it when the time is up.
_BUFFER_BYTES = 512 << 10
_MAX_ADDRESSES = 8
# Measurements this short differ by half on a busy machine.
_MUCH_FASTER = 2.0


@dataclass(frozen=True, kw_only=True)
class Sink:
    """An address of a node that accepts test data."""

    interface: str
    address: str
    port: int
    networks: tuple[str, ...] = ()  # of the interface


@dataclass(frozen=True, kw_only=True)
class MeasuredPath:
    """The measurement of one address of the next node."""

    to: int  # the node's number
    address: str
    interface: str  # of this node, by the route; "": none
    their_interface: str
    bytes_per_s: float  # 0.0: nothing answers there
    networks: tuple[str, ...] = ()  # the networks of the address


class _Handler(socketserver.BaseRequestHandler):
    """Counts received bytes and reports the number."""

    def handle(self) -> None:
        stream: socket.socket = self.request
        stream.settimeout(DOCTOR_PAIR_CONNECT_S)
        count, buffer = 0, bytearray(_CHUNK_BYTES)
        with contextlib.suppress(OSError):  # the sender reports it
            while received := stream.recv_into(buffer):
                count += received
            stream.sendall(count.to_bytes(8, "big"))


class _SinkServer(socketserver.ThreadingTCPServer):
    daemon_threads = True


class _SinkServerV6(_SinkServer):
    address_family = socket.AF_INET6


@contextlib.contextmanager
def listening_sinks(network: Network) -> Iterator[tuple[Sink, ...]]:
    """Accept data on every address of this machine except loopback, within the block."""
    sinks, servers = [], []
    interfaces = [one for one in network.interfaces if one.name != LOOPBACK]
    addresses = [(i, address) for i in interfaces for address in i.addresses]
    for interface, address in addresses[:_MAX_ADDRESSES]:
        with contextlib.suppress(OSError):  # the address has been removed since it was read
            server = (_SinkServerV6 if ":" in address else _SinkServer)((address, 0), _Handler)
            servers.append(server)
            port = int(server.server_address[1])
            sinks.append(
                Sink(
                    interface=interface.name,
                    address=address,
                    port=port,
                    networks=tuple(n for n in interface.networks if _is_in(address, n)),
                )
            )
    with _served(servers, "sink"):
        yield tuple(sinks)


@contextlib.contextmanager
def _served(servers: Sequence[socketserver.TCPServer], purpose: str) -> Iterator[None]:
    threads = [
        threading.Thread(
            target=server.serve_forever,
            args=(DOCTOR_SERVER_TURN_S,),
            name=f"elastic-doctor-{purpose}-{server.server_address[1]}",
        )
        for server in servers
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
        for thread in threads:
            thread.join()


def between_nodes(
    by_node: Callable[[Any], dict[int, Any]],
    names: Sequence[str],
    addresses: Sequence[str],
    number: int,
    network: Network,
) -> list[Finding]:
    """Measure from each node to the next one; the findings are the same on all nodes.

    ``by_node``: exchanges one value of each node. ``number``: of this one.
    """
    with listening_sinks(network) as own:
        sinks = by_node([asdict(sink) for sink in own])
        ways: list[MeasuredPath] = []
        for turn in (0, 1):  # first from 0 to 1, from 2 to 3; then from 1 to 2, from 3 to 4
            if number % 2 == turn and number + 1 in sinks:
                targets = [Sink(**sink) for sink in sinks[number + 1]]
                ways += _measure(network, number + 1, targets)
            by_node(None)
        everyone = by_node([asdict(way) for way in ways])
    measured = {n: [MeasuredPath(**way) for way in values] for n, values in everyone.items()}
    return bandwidth_findings(names, addresses, measured)


def _measure(network: Network, to: int, targets: Sequence[Sink]) -> list[MeasuredPath]:
    """Measure one after the other. Addresses that this machine also has are skipped."""
    return [
        MeasuredPath(
            to=to,
            address=sink.address,
            interface=interface.name if interface is not None else "",
            their_interface=sink.interface,
            bytes_per_s=measure_bandwidth(sink.address, sink.port),
            networks=tuple(sink.networks),
        )
        for sink in targets
        if network.with_address(sink.address) is None
        for interface in [interface_towards(network, sink.address)]
    ]


def measure_bandwidth(address: str, port: int) -> float:
    """Bytes per second, as received by the other end; 0.0 if it is unreachable."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    chunk, sent = bytes(_CHUNK_BYTES), 0
    with socket.socket(family, socket.SOCK_STREAM) as stream:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        stream.settimeout(DOCTOR_PAIR_CONNECT_S)
        try:
            stream.connect((address, port))
            began_s = SYSTEM_CLOCK.monotonic()
            while SYSTEM_CLOCK.monotonic() - began_s < DOCTOR_BANDWIDTH_S:
                sent += stream.send(chunk)
            stream.shutdown(socket.SHUT_WR)
            reply = stream.recv(8, socket.MSG_WAITALL)
        except OSError:
            return 0.0
        took_s = SYSTEM_CLOCK.monotonic() - began_s
    return sent / took_s if reply == sent.to_bytes(8, "big") else 0.0


def bandwidth_findings(
    names: Sequence[str],
    addresses: Sequence[str],
    measured: Mapping[int, Sequence[MeasuredPath]],
) -> list[Finding]:
    """One finding per pair of adjacent nodes. ``measured``: by the number of the sending node."""
    reached = [
        (number, list(ways))
        for number, of_node in sorted(measured.items())
        if (ways := [way for way in of_node if way.bytes_per_s])
    ]
    if not reached:
        return [skipped(NAME, "the nodes have only addresses of the same machine")]
    shared = set.intersection(*({n for way in ways for n in way.networks} for _, ways in reached))
    return [_of_pair(names, addresses, number, ways, shared) for number, ways in reached]


def _of_pair(
    names: Sequence[str],
    addresses: Sequence[str],
    number: int,
    ways: Sequence[MeasuredPath],
    shared: AbstractSet[str],
) -> Finding:
    """The finding for ``ways``, the reached paths to a node; ``shared``: networks of all pairs."""
    other = names[ways[0].to]
    name = f"{NAME} {names[number]} → {other}"
    used = next((way for way in ways if way.address == addresses[ways[0].to]), None)
    best = max(ways, key=lambda way: way.bytes_per_s)
    measured = "; ".join(_shown(way, is_used=way is used) for way in ways)
    if used is not None and best.bytes_per_s >= _MUCH_FASTER * used.bytes_per_s:
        return warning(name, measured, _remedy(best, other, shared))
    return ok(name, measured)


def _remedy(best: MeasuredPath, other: str, shared: AbstractSet[str]) -> str:
    if common := [network for network in best.networks if network in shared]:
        start = f"start all nodes with --rdzv-conf network={common[0]} (or ELASTIC_NETWORK)"
    else:
        start = (
            "start each node with --local-addr=ADDRESS of its faster interface "
            f"({best.address} on {other})"
        )
    return (
        f"{start}, for the store, state transfer, NCCL and gloo; or set "
        f"GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME={best.their_interface} for these alone"
    )


def _is_in(address: str, network: str) -> bool:
    return ipaddress.ip_address(address) in ipaddress.ip_network(network)


def _shown(way: MeasuredPath, *, is_used: bool) -> str:
    interfaces = " to ".join(dict.fromkeys(filter(None, (way.interface, way.their_interface))))
    used = ", which a job uses" if is_used else ""
    return f"{way.address} ({interfaces}{used}) {way.bytes_per_s / 1e9:.3f} GB/s"


# ----------------------------------------------------------------------------
# TCP between every two nodes: a port answers, and a payload larger than any MTU comes back.

PAYLOAD_BYTES = 64 << 10
_CLOCK = struct.Struct("!d")  # the wall clock of a node, when it accepts a connection
_MAX_NAMED = 4


@dataclass(frozen=True, kw_only=True)
class ConnectionAttempt:
    """One attempt from this node to a port of another one."""

    to: int  # the other node's number
    address: str
    port: int
    took_ms: float = 0.0
    error: str = ""
    clock_s: float = 0.0  # the other node's clock minus this one's
    clock_error_s: float = 0.0  # 0: it is not known


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
            stream.sendall(_CLOCK.pack(SYSTEM_CLOCK.wall()))
            stream.sendall(_receive(stream, PAYLOAD_BYTES))


class _EchoServer(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128


class _EchoServerV6(_EchoServer):
    address_family = socket.AF_INET6


@contextlib.contextmanager
def listening_ports(address: str, wanted: Sequence[int]) -> Iterator[BoundPorts]:
    """Serve an ephemeral port and the requested ones, within the block."""
    kind = _EchoServerV6 if ":" in address else _EchoServer
    servers, errors = [], []
    for port in (0, *wanted):
        try:
            servers.append(kind((address, port), _Echo))
        except OSError as error:
            errors.append(f"port {port}: {error.strerror}")
    with _served(servers, "port"):
        ports = tuple(int(server.server_address[1]) for server in servers)
        yield BoundPorts(ports=ports, errors=tuple(errors))


def connect_to_all(targets: Sequence[tuple[int, str, int]]) -> list[ConnectionAttempt]:
    """Connect to all ``targets`` (number, address, port) at once, because timeouts take long."""
    if not targets:
        return []
    with ThreadPoolExecutor(min(len(targets), 64), "elastic-doctor-connect") as pool:
        return list(pool.map(lambda target: _connect(*target), targets))


def _connect(to: int, address: str, port: int) -> ConnectionAttempt:
    began = SYSTEM_CLOCK.monotonic()
    attempt = ConnectionAttempt(to=to, address=address, port=port)
    try:
        with socket.create_connection((address, port), timeout=DOCTOR_PAIR_CONNECT_S) as stream:
            attempt = replace(attempt, took_ms=1000 * (SYSTEM_CLOCK.monotonic() - began))
            (theirs_s,) = _CLOCK.unpack(_receive(stream, _CLOCK.size))
            # Theirs was read at some time since this connection began: half of that is the error.
            half_s = (SYSTEM_CLOCK.monotonic() - began) / 2
            offset_s = theirs_s - (SYSTEM_CLOCK.wall() - half_s)
            attempt = replace(attempt, clock_s=offset_s, clock_error_s=half_s)
            stream.sendall(bytes(PAYLOAD_BYTES))
            _receive(stream, PAYLOAD_BYTES)
    except TimeoutError:
        lost = f"connects, but {PAYLOAD_BYTES >> 10} KiB do not come back"
        silent = f"no answer within {DOCTOR_PAIR_CONNECT_S:g} s"
        return replace(attempt, error=lost if attempt.took_ms else silent)
    except OSError as error:
        return replace(attempt, error=error.strerror or str(error))
    return attempt


def _receive(stream: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        part = stream.recv(size - len(received))
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


def pair_findings(names: Sequence[str], attempts: dict[int, list[Any]]) -> list[Finding]:
    """``attempts``: number of a node → its :class:`ConnectionAttempt`, as dictionaries.

    One finding per failing pair; all reachable nodes share one.
    """
    findings: list[Finding] = []
    for number, raw in sorted(attempts.items()):
        tried = [ConnectionAttempt(**one) for one in raw]
        broken = sorted({one.to for one in tried if one.error})
        well = [one for one in tried if one.to not in broken]
        if well:
            findings.append(_of_reached(names, number, well))
        findings += [
            _of_broken(names[number], names[to], [t for t in tried if t.to == to and t.error])
            for to in broken
        ]
    return findings


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


def clock_findings(names: Sequence[str], attempts: dict[int, list[Any]]) -> list[Finding]:
    """The clock of every other node against the first one's, which has connected to all."""
    best: dict[int, ConnectionAttempt] = {}
    for raw in attempts.get(0, []):
        one = ConnectionAttempt(**raw)
        if one.clock_error_s and (
            one.to not in best or one.clock_error_s < best[one.to].clock_error_s
        ):
            best[one.to] = one
    return [
        checks.of_clock(names[to], one.clock_s, one.clock_error_s)
        for to, one in sorted(best.items())
    ]


# ----------------------------------------------------------------------------
# The preflight, which an agent runs before its node may join: no process groups, no disk.
#
# A healthy node takes a few tenths of a second, mostly to start processes. Deadlines are much
# longer: a busy node must not be rejected.


def preflight(
    store: KeyValue,
    keys: Keys,
    options: AgentOptions,
    *,
    endpoint: Endpoint | None,
    local_addr: str,
) -> list[Finding]:
    """Check this node, its permissions in etcd, and its connection to the job's leader."""
    etcd_address = (endpoint.host, endpoint.port) if endpoint else ("", 0)
    arguments = (configured_address(local_addr, options.network), *etcd_address)
    # Processes only for checks that may hang: name resolution, and an installed driver.
    network = Probe("network", arguments, deadline_s=PREFLIGHT_PROBES_S)
    gpu = Probe("gpu", (), deadline_s=PREFLIGHT_PROBES_S) if checks.has_gpu_driver() else None
    findings = [
        checks.of_permissions(keys.root, tuple(checks.permissions(store, keys.root))),
        *checks.of_certificates(checks.own_certificates(options)),
        *_of_leader(store, keys),
    ]
    return [
        *findings,
        *checks.of_network(network.result()),
        checks.of_shm(checks.shm()),
        *checks.of_limits(checks.limits()),
        *(checks.of_gpu(gpu.result()) if gpu else [skipped("GPU", "no GPU")]),
    ]


def require_fit(findings: Sequence[Finding], node: str) -> None:
    """Raise NodeUnfit if any check has failed, with all failed checks and remedies."""
    bad = [finding for finding in findings if finding.status is Status.FAILED]
    if bad:
        raise NodeUnfit(
            f"preflight: node {node} does not join the job: "
            + "; ".join(f"{finding.name}: {finding.measured}" for finding in bad),
            hint="; ".join(dict.fromkeys(finding.remedy for finding in bad))
            + " (`elastic doctor` on this node has the details)",
        )


def _of_leader(store: KeyValue, keys: Keys) -> Iterator[Finding]:
    """Whether this node reaches the agent that would admit it."""
    with contextlib.suppress(CoordinationError):  # reported by the permissions check
        entry = store.get(keys.leader)
        if entry is None:
            yield skipped("leader", "the job has none yet")
            return
        leader = decode(Leader, entry.key, entry.value)
        ports = [leader.liveness_port]
        if (of_node := store.get(keys.node(leader.node_id))) is not None:
            memory_port = decode(Node, of_node.key, of_node.value).memory_port
            ports += [memory_port] if memory_port else []
        yield _of_ports(leader.address, ports)


def _of_ports(address: str, ports: Sequence[int]) -> Finding:
    name = "leader"
    errors = {port: connection_error(address, port, PREFLIGHT_CONNECT_S) for port in ports}
    closed = {port: error for port, error in errors.items() if error is not None}
    if not closed:
        return ok(name, f"{address} answers on {', '.join(map(str, ports))}")
    measured = "; ".join(f"{address}:{port}: {error}" for port, error in closed.items())
    if all(isinstance(error, ConnectionRefusedError) for error in closed.values()):
        # The leader may have just ended: the next one is elected while this node joins.
        return warning(name, measured, "check that the leader's agent is running")
    return failed(
        name,
        measured,
        "open all TCP ports between the nodes, in both directions; check --local-addr",
    )
