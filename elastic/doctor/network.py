"""Checks between nodes: reachability, bandwidth, and the checks before a node joins."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import json
import os
import secrets
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from elastic.doctor import checks
from elastic.doctor.checks import Finding, Probe, Status, failed, ok, skipped, warning
from elastic.errors import SYSTEM_CLOCK, CoordinationError, ElasticError, NodeUnfit
from elastic.membership.records import Keys, Leader, Node, decode
from elastic.store.client import Endpoint
from elastic.store.keyvalue import Deleted, Entry, KeyValue, Put, Reset, WatchEvent
from elastic.tuning.intervals import (
    DOCTOR_LEASE_S,
)
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
    found: list[Finding] = []
    if not machine_is_checked:
        found += [
            checks.of_shm(checks.shm()),
            *checks.of_limits(checks.limits()),
            *(checks.of_gpu(gpu.result()) if gpu else [skipped("GPU", "no GPU")]),
        ]
    if folder_probe is not None and folder is not None:
        found += checks.of_folder(folder, folder_probe.result())
    return found


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
    found = examine(options.folder, machine_is_checked=options.machine_is_checked)
    os.write(1, json.dumps([asdict(finding) for finding in found]).encode())


if __name__ == "__main__":
    main()


# ----------------------------------------------------------------------------
# Several nodes exchange values through etcd, below the run's prefix.
#
# All keys are on leases: those of a killed doctor expire seconds later. The first node publishes
# the roster of participants, so that two examinations with the same id do not mix while the first
# ends.

CLOCK_ROUNDS = 5


class MeetingFailed(ElasticError):
    """The nodes have not found each other. ``finding`` is the row for the table."""

    def __init__(self, present: list[str], expected: int, within_s: float) -> None:
        names = ", ".join(present)
        message = f"{len(present)} of {expected} nodes arrived within {within_s:g} s: {names}"
        hint = (
            "start `elastic doctor` on each node with the same --nnodes, --rdzv-id and "
            "--rdzv-endpoint"
        )
        super().__init__(message, hint=hint)
        self.finding = failed("nodes", message, hint)


@dataclass(frozen=True, kw_only=True)
class Participant:
    """A node of the examination; its place in the roster is its number."""

    node_id: str  # generated for one examination
    name: str
    host_name: str
    address: str
    nproc: int


class AllGather(Protocol):
    """All nodes exchange one value each: ``number → value``, without missing nodes."""

    def __call__(self, phase: str, value: Any, within_s: float) -> dict[int, Any]: ...


def alone(phase: str, value: Any, within_s: float) -> dict[int, Any]:
    """The all-gather of a single node."""
    return {0: value}


class Meeting:
    """This node's part of the exchange, an AllGather: ``with Meeting(...) as m: m.join(2, 60)``."""

    def __init__(self, store: KeyValue, root: str, me: Participant) -> None:
        self._store = store
        self._root = f"{root}doctor/meeting/"
        self._me = me
        self._changed = threading.Condition()
        self._seen: dict[str, Entry] = {}  # including deleted entries
        self._gone: set[str] = set()
        self._session = ""
        self.members: tuple[Participant, ...] = ()
        self._lease = store.lease(DOCTOR_LEASE_S)
        self._watch = store.watch([self._root], self._on_event, name="doctor-meeting")

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, *unused: object) -> None:
        self._watch.close()
        self._lease.close()

    @property
    def number(self) -> int:
        """This node's number."""
        return [m.node_id for m in self.members].index(self._me.node_id)

    # -- discovery -------------------------------------------------------------------------

    def join(self, nodes: int, within_s: float) -> tuple[Participant, ...]:
        """Wait until ``nodes`` nodes have arrived. Raises MeetingFailed, CoordinationError."""
        ends_s = SYSTEM_CLOCK.monotonic() + within_s
        self._put(f"nodes/{self._me.node_id}", vars(self._me))
        found = self._wait(lambda: self._is_in_roster() or self._founds(nodes), ends_s)
        if found and not self._is_in_roster():
            roster = [vars(m) for m in self._present()[:nodes]]
            self._put(f"roster/{secrets.token_hex(6)}", roster)
            found = self._wait(self._is_in_roster, ends_s)
        if not found:
            raise MeetingFailed([m.name for m in self._present()], nodes, within_s)
        return self.members

    def _founds(self, nodes: int) -> bool:
        present = self._present()
        return len(present) >= nodes and present[0].node_id == self._me.node_id

    def _present(self) -> list[Participant]:
        prefix = f"{self._root}nodes/"
        entries = [e for k, e in self._seen.items() if k.startswith(prefix) and k not in self._gone]
        entries.sort(key=lambda entry: entry.mod_revision)
        return [Participant(**json.loads(entry.value)) for entry in entries]

    def _is_in_roster(self) -> bool:
        prefix = f"{self._root}roster/"
        with self._changed:
            seen = dict(self._seen)
        for key, entry in seen.items():
            if key.startswith(prefix):
                members = tuple(Participant(**one) for one in json.loads(entry.value))
                if self._me in members:
                    self._session, self.members = key.removeprefix(prefix), members
                    return True
        return False

    # -- exchange --------------------------------------------------------------------------

    def __call__(self, phase: str, value: Any, within_s: float) -> dict[int, Any]:
        """Publish ``value`` and wait for those of the other nodes, or until they have left."""
        self._put(f"{self._session}/{phase}/{self.number}", value)
        keys = {n: self._key(phase, n) for n in range(len(self.members))}
        ends_s = SYSTEM_CLOCK.monotonic() + within_s
        self._wait(
            lambda: all(k in self._seen or self._has_left(n) for n, k in keys.items()), ends_s
        )
        with self._changed:
            return {n: json.loads(self._seen[k].value) for n, k in keys.items() if k in self._seen}

    def clocks(self, within_s: float) -> dict[int, tuple[float, float]]:
        """The offset of every node's clock from the first one's, and its error bound, in seconds.

        A node requests the first one's time; both write to etcd. The first node's clock was read
        during the round trip, so half of the round-trip time bounds the error.
        """
        self("clocks", None, within_s)
        ends_s = SYSTEM_CLOCK.monotonic() + within_s
        measured = self._answer(ends_s) if self.number == 0 else self._ask(ends_s)
        found = self("measured clocks", measured, within_s)
        return {n: (value[0], value[1]) for n, value in found.items() if value}

    def _ask(self, ends_s: float) -> tuple[float, float] | None:
        best: tuple[float, float] | None = None
        for turn in range(CLOCK_ROUNDS):
            asked = SYSTEM_CLOCK.wall()
            began = SYSTEM_CLOCK.monotonic()
            self._put(f"{self._session}/ask/{self.number}/{turn}", None)
            key = f"{self._root}{self._session}/answer/{self.number}/{turn}"
            if not self._wait(lambda key=key: key in self._seen, ends_s):  # type: ignore[misc]
                break
            took_s = SYSTEM_CLOCK.monotonic() - began
            answered = float(json.loads(self._seen[key].value))
            if best is None or took_s / 2 < best[1]:
                best = (asked + took_s / 2 - answered, took_s / 2)
        return best

    def _answer(self, ends_s: float) -> tuple[float, float]:
        asks = {
            f"{self._root}{self._session}/ask/{n}/{turn}"
            for n in range(1, len(self.members))
            for turn in range(CLOCK_ROUNDS)
        }
        while asks and self._wait(lambda: bool(asks & self._seen.keys()), ends_s):
            for key in asks & self._seen.keys():
                rest = key.removeprefix(f"{self._root}{self._session}/ask/")
                self._put(f"{self._session}/answer/{rest}", SYSTEM_CLOCK.wall())
                asks.discard(key)
            if all(self._has_left(n) for n in range(1, len(self.members))):
                break
        return (0.0, 0.0)

    # -- parts -----------------------------------------------------------------------------

    def _key(self, phase: str, number: int) -> str:
        return f"{self._root}{self._session}/{phase}/{number}"

    def _has_left(self, number: int) -> bool:
        return f"{self._root}nodes/{self.members[number].node_id}" in self._gone

    def _put(self, name: str, value: Any) -> None:
        self._store.put(f"{self._root}{name}", json.dumps(value).encode(), lease=self._lease)

    def _wait(self, condition: Callable[[], bool], ends_s: float) -> bool:
        with self._changed:
            left_s = max(ends_s - SYSTEM_CLOCK.monotonic(), 0.0)
            return self._changed.wait_for(condition, left_s)

    def _on_event(self, event: WatchEvent) -> None:
        with self._changed:
            if isinstance(event, Reset):
                there = {entry.key: entry for entry in event.snapshot.entries}
                self._gone |= self._seen.keys() - there.keys()
                self._seen.update(there)
            elif isinstance(event, Put):
                self._seen[event.entry.key] = event.entry
            elif isinstance(event, Deleted):
                self._gone.add(event.key)
            self._changed.notify_all()


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
    threads = [
        threading.Thread(
            target=server.serve_forever,
            args=(DOCTOR_SERVER_TURN_S,),
            name=f"elastic-doctor-sink-{sink.port}",
        )
        for server, sink in zip(servers, sinks, strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        yield tuple(sinks)
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
        for thread in threads:
            thread.join()


def between_nodes(
    exchange: AllGather,
    members: Sequence[Participant],
    number: int,
    network: Network,
    within_s: float,
) -> list[Finding]:
    """Measure from each node to the next one; the findings are the same on all nodes."""
    with listening_sinks(network) as own:
        sinks = exchange("sinks", [asdict(sink) for sink in own], within_s)
        ways: list[MeasuredPath] = []
        for turn in (0, 1):  # first from 0 to 1, from 2 to 3; then from 1 to 2, from 3 to 4
            if number % 2 == turn and number + 1 in sinks:
                targets = [Sink(**sink) for sink in sinks[number + 1]]
                ways += _measure(network, number + 1, targets)
            exchange(f"bandwidth {turn}", None, within_s)
        everyone = exchange("bandwidths", [asdict(way) for way in ways], within_s)
    measured = {n: [MeasuredPath(**way) for way in values] for n, values in everyone.items()}
    return bandwidth_findings(members, measured)


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
    members: Sequence[Participant], measured: Mapping[int, Sequence[MeasuredPath]]
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
    return [_of_pair(members, number, ways, shared) for number, ways in reached]


def _of_pair(
    members: Sequence[Participant],
    number: int,
    ways: Sequence[MeasuredPath],
    shared: AbstractSet[str],
) -> Finding:
    """The finding for ``ways``, the reached paths to a node; ``shared``: networks of all pairs."""
    other = members[ways[0].to]
    name = f"{NAME} {members[number].name} → {other.name}"
    used = next((way for way in ways if way.address == other.address), None)
    best = max(ways, key=lambda way: way.bytes_per_s)
    measured = "; ".join(_shown(way, is_used=way is used) for way in ways)
    if used is not None and best.bytes_per_s >= _MUCH_FASTER * used.bytes_per_s:
        return warning(name, measured, _remedy(best, other, shared))
    return ok(name, measured)


def _remedy(best: MeasuredPath, other: Participant, shared: AbstractSet[str]) -> str:
    if common := [network for network in best.networks if network in shared]:
        start = f"start all nodes with --rdzv-conf network={common[0]} (or ELASTIC_NETWORK)"
    else:
        start = (
            "start each node with --local-addr=ADDRESS of its faster interface "
            f"({best.address} on {other.name})"
        )
    return (
        f"{start}, for the store, state transfer, NCCL and gloo; or set "
        f"ELASTIC_INTERFACE={best.their_interface} for NCCL and gloo only"
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


def pair_findings(names: Sequence[str], attempts: dict[int, list[Any]]) -> list[Finding]:
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
    arguments = (configured_address(local_addr, options.network, options.pod_ip), *etcd_address)
    # Processes only for checks that may hang: name resolution, and an installed driver.
    network = Probe("network", arguments, deadline_s=PREFLIGHT_PROBES_S)
    gpu = Probe("gpu", (), deadline_s=PREFLIGHT_PROBES_S) if checks.has_gpu_driver() else None
    found = [
        checks.of_permissions(keys.root, tuple(checks.permissions(store, keys.root))),
        *checks.of_certificates(checks.own_certificates(options)),
        *_of_leader(store, keys),
    ]
    return [
        *found,
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
