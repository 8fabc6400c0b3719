"""Ports for the process group's store, reserved for the lifetime of the agent.

The leader picks the next world's store port from those that rank 0's node has published, so the
node must own free ports ahead of time, and the port must still be free seconds later, when the
worker has imported torch. A bound socket with SO_REUSEADDR that never listens achieves both: the
kernel assigns the port to no other process, but torch's TCPStore, which sets SO_REUSEADDR, too, may
still listen on it [measured with torch 2.13: libuv and the older backend].
"""

from __future__ import annotations

import socket


class PortReserve:
    """A few reserved TCP ports; generation g uses ``ports[g % len(ports)]``."""

    def __init__(self, count: int = 4) -> None:
        self._sockets = [_reserve() for _ in range(count)]
        self._replica = _reserve()

    @property
    def ports(self) -> tuple[int, ...]:
        return tuple(int(s.getsockname()[1]) for s in self._sockets)

    @property
    def replica_port(self) -> int:
        """The port for the store of a replica's ranks, which they keep for their lifetime."""
        return int(self._replica.getsockname()[1])

    def close(self) -> None:
        """Release all of them."""
        for held in (*self._sockets, self._replica):
            held.close()
        self._sockets = []


def _reserve() -> socket.socket:
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held
