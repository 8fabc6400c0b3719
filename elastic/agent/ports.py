"""Free ports for the process group's store, held until they are handed out.

The leader picks the next world's store port from what rank 0's node has published, so the node
must know free ports ahead of time. A bound socket that does not listen keeps the kernel from
giving the port to anybody else; it is closed just before the workers start.
"""

from __future__ import annotations

import socket


class PortReserve:
    """A few reserved TCP ports, addressed as ``ports[generation % len(ports)]``."""

    def __init__(self, count: int = 4) -> None:
        self._sockets = [_reserve() for _ in range(count)]

    @property
    def ports(self) -> tuple[int, ...]:
        return tuple(int(s.getsockname()[1]) for s in self._sockets)

    def release(self, port: int) -> None:
        """Let go of ``port`` and reserve another in its place. Unknown ports are ignored:
        the world may have been formed from an earlier record of this node."""
        for index, held in enumerate(self._sockets):
            if held.getsockname()[1] == port:
                self._sockets[index] = _reserve()
                held.close()

    def close(self) -> None:
        for held in self._sockets:
            held.close()
        self._sockets = []


def _reserve() -> socket.socket:
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held
