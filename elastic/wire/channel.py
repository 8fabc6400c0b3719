"""One blocking connection: authenticated, with framed messages, and bulk data without copies.

Every wait has a deadline, and bulk data extends it by the time that a slow network needs for it: a
peer that is too slow counts as dead. Nothing is allocated because of an announced length.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any

from elastic.wire import base
from elastic.wire.base import PEER_SILENCE_S, give_up_on_silence
from elastic.wire.handshake import MAX_FRAME, ClientHandshake, FrameReader, SecretKey, frame
from elastic.wire.tls import Tls, failure

SLOWEST_BYTES_PER_S = 2 << 20
_READ_BYTES = 1 << 16


class Channel:
    """For one thread at a time, except :meth:`cut`. Owns the connection.

    With ``tls`` it is a client's, and :meth:`authenticate` begins with the TLS handshake. (A hub
    has made its own before it gives a connection away.)

    ``look`` is called every ``slice_s`` during waits, and may raise to abort. In that case and
    after a deadline, a partially received message is completed by the next receive.

    A peer whose machine is silent for ``silence_s`` is dead, regardless of the deadline.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        timeout_s: float,
        tls: Tls | None = None,
        received: bytes = b"",
        slice_s: float = float("inf"),
        look: Callable[[], object] = lambda: None,
        silence_s: float = PEER_SILENCE_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout_s = timeout_s
        self._slice_s = slice_s
        self._look = look
        self._monotonic = monotonic
        self._reader = FrameReader(MAX_FRAME, received)
        self._by_s = 0.0
        self._is_secured = tls is None
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        give_up_on_silence(connection, silence_s)
        self._socket = connection if tls is None else tls.wrap(connection, server_side=False)
        self.expect(0)

    def authenticate(
        self, key: SecretKey, identity: str = "", *, expected: str | None, proves: bool = True
    ) -> str:
        """Authenticate as the client: verify that the server has the key, and prove the same.
        Returns the server's identity.

        One round trip: the server does not respond to the proof, so the first message may follow
        it. Without ``proves`` it is not sent: for a client that only identifies the server.

        Raises:
            AuthenticationError: the server does not have the key.
            TlsError: only one end uses TLS, or a certificate was rejected.
            ProtocolError: it does not speak this protocol, or is not ``expected``.
            OSError: it is gone, or silent.
        """
        self._secure()
        handshake = ClientHandshake(key, identity, expected=expected)
        self.send_frame(handshake.hello)
        challenge = self.receive_frame(MAX_FRAME)
        if challenge is None:
            raise ConnectionResetError("the connection was closed before the server proved itself")
        proof = handshake.answer(challenge)
        if proves:
            self.send_frame(proof)
        return handshake.peer

    def _secure(self) -> None:
        """Perform the TLS handshake, if TLS is used. One round trip."""
        if not self._is_secured and isinstance(self._socket, ssl.SSLSocket):
            self._wait(lambda sock: sock.do_handshake(), self._socket)
            self._is_secured = True

    # -- deadlines ----------------------------------------------------------------------------

    def expect(self, size_bytes: int) -> None:
        """Set the deadline so that there is time for this many bytes, in both directions
        together."""
        self.wait(self._timeout_s + size_bytes / SLOWEST_BYTES_PER_S)

    def wait(self, timeout_s: float) -> None:
        """Set the deadline to this many seconds from now."""
        self._by_s = self._monotonic() + timeout_s

    # -- messages -----------------------------------------------------------------------------

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a JSON object as a frame."""
        self.send_frame(base.encode(message))

    def send_frame(self, payload: bytes) -> None:
        self.send_bytes(frame(payload))

    def receive(self, most: int) -> dict[str, Any] | None:
        """The next message, of at most this many bytes; None if the peer closed before one began.

        Raises ProtocolError if it is not a valid message.
        """
        payload = self.receive_frame(most)
        return None if payload is None else base.decode(payload)

    def receive_frame(self, most: int) -> bytes | None:
        """Like :meth:`receive`, but not parsed."""
        self._reader.limit = most
        while missing := self._reader.missing:  # exactly: bulk bytes may follow
            chunk = self._wait(lambda most: self._socket.recv(most), min(missing, _READ_BYTES))
            if not chunk:
                if self._reader.is_partial:
                    raise ConnectionResetError("the other side closed in the middle")
                return None
            self._reader.feed(chunk)
        return self._reader.next()

    # -- bulk bytes ---------------------------------------------------------------------------

    def send_bytes(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes without a frame."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._wait(self._socket.send, rest) :]

    def fill(self, into: memoryview) -> None:
        """Fill ``into`` completely. Raises ``ConnectionError`` if the peer closes before that."""
        early = self._reader.take(len(into))
        into[: len(early)] = early
        done = len(early)
        while done < len(into):
            count = self._wait(self._socket.recv_into, into[done:])
            if count == 0:
                raise ConnectionResetError("the other side closed in the middle")
            done += count

    # -- the end ------------------------------------------------------------------------------

    def cut(self) -> None:
        """Shut the connection down from another thread. The thread that uses it gets an error or
        the end of the stream, and closes it.

        Closing it here would free its descriptor for another connection while it is in use.
        """
        with contextlib.suppress(OSError):
            # Not SSLSocket.shutdown, which discards the TLS state first: the other thread would
            # send its next message unencrypted.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _wait(self, operate: Callable[[Any], Any], argument: Any) -> Any:
        while True:
            left_s = self._by_s - self._monotonic()
            if left_s <= 0:
                raise TimeoutError("too slow")
            self._socket.settimeout(min(left_s, self._slice_s))
            try:
                return operate(argument)
            except TimeoutError:
                self._look()
            except ssl.SSLError as error:
                raise failure(error, is_handshake=not self._is_secured) from None
