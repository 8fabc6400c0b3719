"""Parses IPv4 packets for the switch: source, target and connection."""

from __future__ import annotations

import socket
from dataclasses import dataclass

_VERSION_4 = 4
_MIN_HEADER_BYTES = 20
_WORD_BYTES = 4
_PORTS_BYTES = 4


@dataclass(frozen=True)
class Flow:
    """One direction of a TCP connection; addresses and ports in network byte order."""

    source: bytes
    target: bytes
    ports: bytes

    @property
    def source_port(self) -> bytes:
        """In network byte order."""
        return self.ports[:2]

    @property
    def target_port(self) -> bytes:
        """In network byte order."""
        return self.ports[2:]


def addresses_of(packet: bytes) -> tuple[bytes, bytes] | None:
    """Source and target address; None if it is not an IPv4 packet.

    >>> addresses_of(b"")
    """
    if len(packet) < _MIN_HEADER_BYTES or packet[0] >> 4 != _VERSION_4:
        return None
    return packet[12:16], packet[16:20]


def flow_of(packet: bytes) -> Flow | None:
    """The flow of an IPv4 packet; None if it is not TCP, or a later fragment."""
    is_fragment = (packet[6] & 0x1F) or packet[7]
    begin = (packet[0] & 0x0F) * _WORD_BYTES
    if packet[9] != socket.IPPROTO_TCP or is_fragment or len(packet) < begin + _PORTS_BYTES:
        return None
    return Flow(packet[12:16], packet[16:20], packet[begin : begin + _PORTS_BYTES])
