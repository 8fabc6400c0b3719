"""Messages on a stream: four bytes of length, and as many bytes. Never more than the limit."""

from __future__ import annotations

import struct

from elastic.secure_channel.errors import ProtocolError, TlsError
from elastic.secure_channel.tls import SAME_EVERYWHERE, is_record

_LENGTH = struct.Struct("!I")
HEADER_BYTES = _LENGTH.size


def frame(payload: bytes) -> bytes:
    """The payload, preceded by its length."""
    return _LENGTH.pack(len(payload)) + payload


class FrameReader:
    """The received bytes of a connection: complete frames are passed on, the rest is kept.

    ``limit`` may change between two frames: it is lower before authentication.
    """

    def __init__(self, limit: int, received: bytes = b"") -> None:
        self.limit = limit
        self._received = bytearray(received)

    def feed(self, chunk: bytes) -> None:
        """Add received bytes."""
        self._received += chunk

    def next(self) -> bytes | None:
        """The payload of the next complete frame. Raises ProtocolError as soon as it is too
        long."""
        if self.missing:
            return None
        end = HEADER_BYTES + self._announced()
        payload = bytes(memoryview(self._received)[HEADER_BYTES:end])
        del self._received[:end]
        return payload

    @property
    def missing(self) -> int:
        """How many more bytes the next frame needs, as far as known. Raises ProtocolError."""
        if len(self._received) < HEADER_BYTES:
            return HEADER_BYTES - len(self._received)
        return max(0, HEADER_BYTES + self._announced() - len(self._received))

    @property
    def is_partial(self) -> bool:
        """Whether a frame has begun and is not complete."""
        return bool(self._received)

    def take(self, most: int) -> bytes:
        """Up to this many of the received bytes, unparsed: bulk data that follows a frame."""
        taken = bytes(memoryview(self._received)[:most])
        del self._received[: len(taken)]
        return taken

    def _announced(self) -> int:
        (length,) = _LENGTH.unpack_from(self._received)
        if length > self.limit:
            if is_record(self._received):
                raise TlsError(f"it speaks TLS, and this node does not: {SAME_EVERYWHERE}")
            raise ProtocolError(f"a frame of {length} bytes, more than {self.limit}")
        return int(length)
