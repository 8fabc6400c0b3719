"""Bandwidth of the paths between two nodes: a job uses one address per node, perhaps a slow one.

Every node sends briefly to each address of the next one, over the interface that the kernel
selects. No two measurements share a node.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import socketserver
import threading
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass

from elastic.clock import SYSTEM_CLOCK
from elastic.doctor.findings import Finding, ok, skipped, warning
from elastic.doctor.meeting import AllGather, Participant
from elastic.tuning.doctor_intervals import (
    DOCTOR_BANDWIDTH_S,
    DOCTOR_PAIR_CONNECT_S,
    DOCTOR_SERVER_TURN_S,
)
from elastic.tuning.network import LOOPBACK, Network, interface_towards

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


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True


class _ServerV6(_Server):
    address_family = socket.AF_INET6


@contextlib.contextmanager
def listening(network: Network) -> Iterator[tuple[Sink, ...]]:
    """Accept data on every address of this machine except loopback, within the block."""
    sinks, servers = [], []
    interfaces = [one for one in network.interfaces if one.name != LOOPBACK]
    addresses = [(i, address) for i in interfaces for address in i.addresses]
    for interface, address in addresses[:_MAX_ADDRESSES]:
        with contextlib.suppress(OSError):  # the address has been removed since it was read
            server = (_ServerV6 if ":" in address else _Server)((address, 0), _Handler)
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
    with listening(network) as own:
        sinks = exchange("sinks", [asdict(sink) for sink in own], within_s)
        ways: list[MeasuredPath] = []
        for turn in (0, 1):  # first from 0 to 1, from 2 to 3; then from 1 to 2, from 3 to 4
            if number % 2 == turn and number + 1 in sinks:
                targets = [Sink(**sink) for sink in sinks[number + 1]]
                ways += _measure(network, number + 1, targets)
            exchange(f"bandwidth {turn}", None, within_s)
        everyone = exchange("bandwidths", [asdict(way) for way in ways], within_s)
    measured = {n: [MeasuredPath(**way) for way in values] for n, values in everyone.items()}
    return findings(members, measured)


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


def findings(
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
