"""One connection of a hub, and what a hub's owner does with it."""

from __future__ import annotations

import errno
import selectors
import socket
import ssl
from enum import Enum

from elastic.secure_channel.errors import ProtocolError
from elastic.secure_channel.frames import FrameReader
from elastic.secure_channel.handshake import MAX_FRAME, ClientHandshake, ServerHandshake
from elastic.secure_channel.tls import RECORD_BYTES, awaited_event, failure

READ_BYTES = 1 << 16
# What the kernel says of a peer that is not heard any more, and may live: tcp(7), icmp(7).
_SILENT = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH})


class State(Enum):
    """Of a connection, in this order; CLOSED from any."""

    CONNECTING = "connecting"
    SECURING = "securing"  # TLS
    PROVING = "proving"
    OPEN = "open"
    CLOSED = "closed"


class Connection:
    """One connection of a hub. For the hub's thread; ``data`` is its owner's."""

    def __init__(self, sock: socket.socket, address: str, *, is_outgoing: bool, limit: int) -> None:
        self.socket = sock
        self.address = address  # of the peer, for its budget and for people
        self.is_outgoing = is_outgoing
        self.identity = ""  # of the peer, as it has proved with the key
        self.was_open = False
        self.fell_silent = False  # it ended because nothing came from the peer's machine
        self.data: object = None
        self.state = State.CONNECTING if is_outgoing else State.PROVING
        self.handshake: ClientHandshake | ServerHandshake | None = None
        self.has_greeted = False  # the client's hello has been answered
        self.reader = FrameReader(MAX_FRAME)
        self.open_limit = limit
        self.unsent = bytearray()
        self.frames = 0  # received
        self.timed_frame = -1  # the one that the deadline is for
        # What the selector is to wait for before the next try. TLS may have to read in order to
        # write, and the other way.
        self.read_awaits = selectors.EVENT_READ
        self.send_awaits = selectors.EVENT_WRITE

    @property
    def awaits(self) -> int:
        """The events that the selector is to tell of."""
        return self.read_awaits | (self.send_awaits if self.unsent else 0)

    @property
    def is_closed(self) -> bool:
        return self.state is State.CLOSED

    def receive(self) -> bytes | None:
        """What the peer has sent: ``None`` if nothing has come yet, empty if it has hung up.

        Raises ProtocolError where TLS refuses what has come.
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

        Raises ProtocolError where TLS refuses.
        """
        self.send_awaits = selectors.EVENT_WRITE
        try:
            while unsent := self.unsent:
                if isinstance(self.socket, ssl.SSLSocket):
                    # OpenSSL takes all of it or nothing, and the same again where it took nothing.
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
    """TLS has failed for good: because the peer is gone, or because it was refused."""
    why = failure(error)
    if isinstance(why, ProtocolError):
        raise why from error


class Handler:
    """What a hub's owner does with its connections, all on the hub's thread.

    A :class:`ProtocolError` from ``admit``, ``opened`` or ``received`` ends that connection. Any
    other exception is a fault of this program, and ends the hub.
    """

    def admit(self, sock: socket.socket) -> str:
        """Who connects: the address whose budget it is. Refuse by raising ProtocolError."""
        address = sock.getpeername()
        return str(address[0]) if isinstance(address, tuple) else str(address)

    def opened(self, connection: Connection) -> None:
        """Both ends have proved that they know the key."""

    def received(self, connection: Connection, payload: bytes) -> None:
        """A frame has come."""

    def closed(self, connection: Connection) -> None:
        """It has ended, open or not, other than by ``drop(tell=False)``."""
