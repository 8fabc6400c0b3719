"""Messages on their way to the agent: any thread may put, none blocks, the order is preserved.

The thread that puts also sends, so that the last messages of a process are sent before it ends. The
link's thread sends the rest once the socket is writable. Unsent frames outlive a connection: the
next one begins with the first frame that the last one did not take.
"""

from __future__ import annotations

import socket
import threading
from collections import deque

MAX_FRAMES = 1024  # unsent; the agent has not read for minutes


class Outbox:
    """One per client; ``put`` and ``flush`` may interrupt each other, in signal handlers too."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()
        self._taken = 0  # bytes of the first frame that this connection has taken
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()

    @property
    def is_empty(self) -> bool:
        return not self._frames

    def attach(self, sock: socket.socket) -> None:
        """Send on this one, which does not block."""
        with self._lock:
            self._socket, self._taken = sock, 0

    def detach(self) -> None:
        """Before the socket is closed: no thread uses it then."""
        with self._lock:
            self._socket = None

    def put(self, frame: bytes) -> bool:
        """Whether there was room for it."""
        if len(self._frames) >= MAX_FRAMES:
            return False
        self._frames.append(frame)
        return True

    def flush(self, wait_s: float = 0.0) -> bool:
        """Send as much as the socket accepts; False: call again when it is writable."""
        if not self._lock.acquire(timeout=wait_s):
            return False  # the thread that sends may have checked for the last time
        try:
            while self._frames and self._socket is not None:
                if not self._send_first(self._socket):
                    return False
            return True
        finally:
            self._lock.release()

    def _send_first(self, sock: socket.socket) -> bool:
        frame = self._frames[0]
        try:
            self._taken += sock.send(frame[self._taken :])
        except OSError:
            return False  # full, or broken: its reader sees the end of that, and connects again
        if self._taken == len(frame):
            self._frames.popleft()
            self._taken = 0
        return True
