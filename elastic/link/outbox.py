"""The queue of messages to the agent: any thread may put, none blocks, the order is preserved.

The thread that puts also sends, so that a process's last messages are sent before it ends. The
link's thread sends the rest once the socket is writable. Unsent frames outlive a connection: the
next one begins with the first frame that was not sent completely.
"""

from __future__ import annotations

import socket
import threading
from collections import deque

MAX_FRAMES = 1024  # unsent frames: at this limit the agent has read nothing for minutes


class Outbox:
    """One per client; ``put`` and ``flush`` may interrupt each other, in signal handlers too."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()
        self._taken = 0  # bytes of the first frame that are sent on this connection
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()

    @property
    def is_empty(self) -> bool:
        return not self._frames

    def attach(self, sock: socket.socket) -> None:
        """Send on this non-blocking socket from now on."""
        with self._lock:
            self._socket, self._taken = sock, 0

    def detach(self) -> None:
        """Stop using the socket, before it is closed."""
        with self._lock:
            self._socket = None

    def put(self, frame: bytes) -> bool:
        """Queue a frame. Returns False if the queue is full."""
        if len(self._frames) >= MAX_FRAMES:
            return False
        self._frames.append(frame)
        return True

    def flush(self, wait_s: float = 0.0) -> bool:
        """Send as much as the socket accepts; False: call again when it is writable."""
        if not self._lock.acquire(timeout=wait_s):
            return False  # the sending thread may already have checked the queue for the last time
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
            return False  # full, or broken: the receiving thread notices that and reconnects
        if self._taken == len(frame):
            self._frames.popleft()
            self._taken = 0
        return True
