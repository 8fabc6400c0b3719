"""One connection of a hub, all connections of a hub, and the interface of the hub's owner."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import ssl
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

from elastic.secure_channel.errors import ProtocolError
from elastic.secure_channel.frames import FrameReader
from elastic.secure_channel.handshake import MAX_FRAME, ClientHandshake, ServerHandshake
from elastic.secure_channel.limits import Limits, Unauthenticated, give_up_on_silence
from elastic.secure_channel.tls import RECORD_BYTES, awaited_event, failure

READ_BYTES = 1 << 16
# Errors of the kernel about a peer that no longer responds, but may be alive: tcp(7), icmp(7).
_SILENT = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH})


class State(Enum):
    """The states of a connection, in order; CLOSED may follow any of them."""

    CONNECTING = "connecting"
    SECURING = "securing"  # TLS
    PROVING = "proving"
    OPEN = "open"
    CLOSED = "closed"


class Connection:
    """One connection of a hub, for the hub's thread; ``data`` belongs to the hub's owner."""

    def __init__(self, sock: socket.socket, address: str, *, is_outgoing: bool, limit: int) -> None:
        self.socket = sock
        self.address = address  # of the peer, for its budget and for users
        self.is_outgoing = is_outgoing
        self.identity = ""  # of the peer, as it has proved with the key
        self.was_open = False
        self.fell_silent = False  # it ended because the peer's machine was silent
        self.data: object = None
        self.state = State.CONNECTING if is_outgoing else State.PROVING
        self.handshake: ClientHandshake | ServerHandshake | None = None
        self.is_handshaken = False  # the client's Hello has been answered
        self.reader = FrameReader(MAX_FRAME)
        self.open_limit = limit
        self.unsent = bytearray()
        self.frames = 0  # received
        self.timed_frame = -1  # the frame to which the deadline applies
        # The events to wait for before the next attempt. TLS may have to read in order to write,
        # and vice versa.
        self.read_awaits = selectors.EVENT_READ
        self.send_awaits = selectors.EVENT_WRITE

    @property
    def awaits(self) -> int:
        """The events to select for."""
        return self.read_awaits | (self.send_awaits if self.unsent else 0)

    @property
    def is_closed(self) -> bool:
        return self.state is State.CLOSED

    def receive(self) -> bytes | None:
        """Data that the peer has sent: ``None`` if none has arrived yet, empty if it has closed.

        Raises ProtocolError if TLS rejects the data.
        """
        try:
            chunk = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return None
        except ssl.SSLError as error:
            if awaited := awaited_event(error):
                self.read_awaits = awaited
                return None
            _raise_if_refused(error)
            return b""
        except OSError as error:
            self.fell_silent = error.errno in _SILENT
            return b""
        self.read_awaits = selectors.EVENT_READ
        return chunk

    def send_unsent(self) -> bool:
        """Send what can be sent without waiting; ``False`` if the peer has hung up.

        Raises ProtocolError if TLS rejects the connection.
        """
        self.send_awaits = selectors.EVENT_WRITE
        try:
            while unsent := self.unsent:
                if isinstance(self.socket, ssl.SSLSocket):
                    # OpenSSL accepts all of it or nothing; then the same bytes must be retried.
                    unsent = unsent[:RECORD_BYTES]
                del self.unsent[: self.socket.send(unsent)]
        except BlockingIOError:
            pass
        except ssl.SSLError as error:
            if awaited := awaited_event(error):
                self.send_awaits = awaited
                return True
            _raise_if_refused(error)
            return False
        except OSError as error:
            self.fell_silent = error.errno in _SILENT
            return False
        return True


def _raise_if_refused(error: ssl.SSLError) -> None:
    """TLS has failed permanently: the peer has ended, or refused the connection."""
    why = failure(error)
    if isinstance(why, ProtocolError):
        raise why from error


class HubConnections:
    """All connections of one hub, and their deadlines; for the hub's thread."""

    def __init__(
        self, selector: selectors.BaseSelector, limits: Limits, monotonic: Callable[[], float]
    ) -> None:
        self._selector = selector
        self._limits = limits
        self._monotonic = monotonic
        self._all: set[Connection] = set()
        self._deadlines: dict[Connection, float] = {}
        self.unauthenticated: Unauthenticated[Connection] = Unauthenticated(limits)
        self.accepted_open = 0  # accepted ones that are open

    def __iter__(self) -> Iterator[Connection]:
        return iter(tuple(self._all))

    def add(self, connection: Connection, within_s: float, events: int) -> None:
        """Select for ``events``; the connection must make progress within ``within_s``."""
        self._all.add(connection)
        self.allow(connection, within_s)
        self._selector.register(connection.socket, events, connection)

    def add_accepted(self, connection: Connection) -> None:
        """Add an accepted connection, which must authenticate itself."""
        self.unauthenticated.add(connection, connection.address, self._monotonic())
        self.add(connection, self._limits.handshake_s, selectors.EVENT_READ)

    def allow(self, connection: Connection, seconds: float) -> None:
        """Set its deadline to this many seconds from now."""
        self._deadlines[connection] = self._monotonic() + seconds

    def opened(self, connection: Connection) -> None:
        """It is authenticated: an idle connection has no deadline."""
        self.unauthenticated.discard(connection)
        self._deadlines.pop(connection, None)
        self.accepted_open += not connection.is_outgoing

    def time_message(self, connection: Connection) -> None:
        """A message that has begun must end in time; an idle connection has no deadline."""
        if not connection.reader.is_partial:
            self._deadlines.pop(connection, None)
        elif connection not in self._deadlines or connection.timed_frame != connection.frames:
            connection.timed_frame = connection.frames
            self.allow(connection, self._limits.message_s)

    def watch(self, connection: Connection) -> None:
        """Have the selector wait for the event that the connection needs."""
        if self._selector.get_key(connection.socket).events != connection.awaits:
            self._selector.modify(connection.socket, connection.awaits, connection)

    def forget(self, connection: Connection) -> None:
        """It is closed, or its owner has taken its socket."""
        if connection.state is State.OPEN and not connection.is_outgoing:
            self.accepted_open -= 1
        connection.state = State.CLOSED
        self._all.discard(connection)
        self.unauthenticated.discard(connection)
        self._deadlines.pop(connection, None)
        self._selector.unregister(connection.socket)

    def close(self) -> None:
        """Close all; the selector no longer runs."""
        for connection in self._all:
            connection.state = State.CLOSED
            connection.socket.close()
        self._all.clear()

    @property
    def deadlines_s(self) -> tuple[float, ...]:
        """When connections expire."""
        return tuple(self._deadlines.values())

    def expired(self) -> list[Connection]:
        """Those whose deadline has passed."""
        if not self._deadlines:
            return []
        now_s = self._monotonic()
        return [c for c, at_s in self._deadlines.items() if now_s >= at_s]


class Handler:
    """The owner's handling of a hub's connections, all on the hub's thread.

    A :class:`ProtocolError` from ``admit``, ``opened`` or ``received`` ends that connection. Any
    other exception is a fault of this program, and ends the hub.
    """

    def admit(self, sock: socket.socket) -> str:
        """Return the peer's address, for its budget. Refuse by raising ProtocolError."""
        address = sock.getpeername()
        return str(address[0]) if isinstance(address, tuple) else str(address)

    def opened(self, connection: Connection) -> None:
        """Both ends have proved possession of the key."""

    def received(self, connection: Connection, payload: bytes) -> None:
        """A frame has arrived."""

    def closed(self, connection: Connection) -> None:
        """It has ended, open or not, other than by ``drop(notify=False)``."""


def outgoing_socket(host: str, port: int) -> tuple[socket.socket, Any]:
    """A non-blocking socket, and the address to connect it to. ``host`` is never a name.

    Raises OSError.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    sock.setblocking(False)
    return sock, address


def set_up(sock: socket.socket, silence_s: float) -> None:
    """Disable Nagle's algorithm; end the connection if the peer's machine is silent for
    ``silence_s``."""
    give_up_on_silence(sock, silence_s)
    if sock.family != socket.AF_UNIX:
        with contextlib.suppress(OSError):  # it has ended: the next event reports it
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
