"""Creates the sockets on which hubs listen, and decides when a hub accepts connections."""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Callable

from elastic.secure_channel.limits import ACCEPT_AGAIN_S


def listen(host: str, port: int = 0, *, backlog: int) -> socket.socket:
    """A TCP listener at that address; on all addresses, if it is not one of this machine's own
    (NAT)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=backlog)
    except OSError:
        return socket.create_server(("", port), family=family, backlog=backlog)


def listen_on_path(path: str | os.PathLike[str], *, backlog: int) -> socket.socket:
    """A Unix socket listener."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(os.fspath(path))
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


class Acceptor:
    """Accepts connections while there is room for them; for the hub's thread.

    Otherwise the selector does not watch the listener: connections wait in the kernel.
    ``room_in_s`` returns the seconds until there is room, given the time; 0 if there is.
    """

    def __init__(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        room_in_s: Callable[[float], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._listener = listener
        self._selector = selector
        self._room_in_s = room_in_s
        self._monotonic = monotonic
        self._is_watched = False
        self._resume_at_s = 0.0
        self._waits_for_room = False

    @property
    def resumes_at_s(self) -> tuple[float, ...]:
        """When :meth:`resume` must run; empty if it need not."""
        return () if self._is_watched else (self._resume_at_s,)

    def resume(self) -> None:
        """Watch the listener again, if it is time, or if there is room before that."""
        if self._is_watched:
            return
        now_s = self._monotonic()
        has_room = self._waits_for_room and not self._room_in_s(now_s)
        if has_room or now_s >= self._resume_at_s:
            self._waits_for_room = False
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._is_watched = True

    def close(self) -> None:
        """Stop watching the listener."""
        if self._is_watched:
            self._selector.unregister(self._listener)
            self._is_watched = False

    def accept(self) -> socket.socket | None:
        """The next connection; ``None`` if none is pending, or there is no room for it.

        Raises OSError, and pauses, if the process has no free descriptor.
        """
        if room_in_s := self._room_in_s(self._monotonic()):
            self._pause(room_in_s)
            self._waits_for_room = True
            return None
        try:
            return self._listener.accept()[0]
        except (BlockingIOError, ConnectionAbortedError):
            return None
        except OSError:  # accepting at once again would fail in a busy loop
            self._pause(ACCEPT_AGAIN_S)
            raise

    def _pause(self, seconds: float) -> None:
        if self._is_watched:
            self._selector.unregister(self._listener)
        self._is_watched = False
        self._resume_at_s = self._monotonic() + seconds
