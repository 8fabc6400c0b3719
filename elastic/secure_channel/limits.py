"""The maximum resources that a listener uses for others: bytes, seconds, connections, and log
lines."""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
Report = Callable[[str], object]
# Secure channels do not import elastic, so their intervals are here and not in elastic/tuning.
REPORT_EVERY_S = 10.0  # lines about bad clients
ACCEPT_AGAIN_S = 0.2  # after no descriptor was free
LOAD_AGAIN_S = 1.0  # TLS files that could not be used, and have not changed since
# A peer whose machine acknowledges nothing for this long is dead; if there are leases, their length
# determines it (elastic/tuning/timeouts.py, peer_silence_s).
PEER_SILENCE_S = 6.0
_PROBES = 3  # within that time; the kernel counts in whole seconds


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of one listener. Unauthenticated connections have tighter limits."""

    frame_bytes: int  # of a client's message
    server_frame_bytes: int = 0  # of a message from a server that this hub has connected to
    unsent_bytes: int = 2 << 20  # for one connection that does not read
    handshake_s: float = 5.0  # from connecting to the proof
    message_s: float = 10.0  # from a message's first byte to its last
    silence_s: float = PEER_SILENCE_S  # of a TCP peer's kernel: see give_up_on_silence
    open_connections: int = 1024  # that have proved themselves
    pending_connections: int = 128  # that have not yet
    pending_per_address: int = 64
    # A handshake takes milliseconds. If clients arrive faster than they are served, younger ones
    # wait in the kernel's queue, so that a burst of legitimate clients evicts none of them.
    evict_after_s: float = 0.05


def give_up_on_silence(sock: socket.socket, silence_s: float) -> None:
    """End a TCP connection whose peer's kernel acknowledges nothing for ``silence_s``.

    Otherwise a disconnected cable is never detected on an idle connection, and on one with pending
    bytes only after a quarter of an hour (tcp(7): tcp_retries2). Keep-alive probes are for the idle
    one, TCP_USER_TIMEOUT is for the other; a live peer that accepts none of the pending bytes
    counts as silent as well. A stopped process does not: its kernel responds.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    every_s = max(1, math.floor(silence_s / _PROBES))
    with contextlib.suppress(OSError):  # it has ended: the next event reports it
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(silence_s * 1000))


class Unauthenticated(Generic[T]):
    """Connections that are not authenticated yet: the oldest is evicted first."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._since_s: dict[T, tuple[float, str]] = {}  # oldest first
        self._addresses: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._since_s)

    def __iter__(self) -> Iterator[T]:
        return iter(tuple(self._since_s))

    def add(self, connection: T, address: str, now_s: float) -> None:
        """It has connected."""
        self._since_s[connection] = now_s, address
        self._addresses[address] += 1

    def discard(self, connection: T) -> None:
        """It is authenticated, or has ended."""
        found = self._since_s.pop(connection, None)
        if found is not None:
            self._addresses[found[1]] -= 1
            if not self._addresses[found[1]]:
                del self._addresses[found[1]]

    @property
    def oldest(self) -> T | None:
        """The next one to evict."""
        return next(iter(self._since_s), None)

    def room_in_s(self, now_s: float) -> float:
        """Seconds until another one may connect: 0 at once, possibly after :meth:`to_evict` has
        ended."""
        if len(self._since_s) < self._limits.pending_connections:
            return 0.0
        since_s, _ = next(iter(self._since_s.values()))
        return max(0.0, since_s + self._limits.evict_after_s - now_s)

    def to_evict(self) -> T | None:
        """The connection to evict for one more; None: there is room."""
        is_full = len(self._since_s) >= self._limits.pending_connections
        return self.oldest if is_full else None

    def to_evict_of(self, address: str) -> T | None:
        """The connection to evict for one more of this address; None: there is room."""
        if self._addresses[address] < self._limits.pending_per_address:
            return None
        return next(one for one, (_, at) in self._since_s.items() if at == address)


class LimitedReports:
    """Rate-limits the log of one listener: a flood of bad clients must not fill a disk."""

    def __init__(
        self,
        report: Report,
        *,
        every_s: float = REPORT_EVERY_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report = report
        self._every_s = every_s
        self._monotonic = monotonic
        self._not_before_s = float("-inf")
        self._left_out = 0

    def __call__(self, line: str) -> None:
        now_s = self._monotonic()
        if now_s < self._not_before_s:
            self._left_out += 1
            return
        more = f" ({self._left_out} more such lines were suppressed)" if self._left_out else ""
        self._not_before_s, self._left_out = now_s + self._every_s, 0
        self._report(line + more)
