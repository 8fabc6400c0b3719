"""How parts of checkpoints travel between the memories of two nodes: frames over TCP.

Both sides prove that they know the job's token, by HMAC over two random challenges; the token
itself is never sent. Then requests and answers: four bytes of length, strict JSON of at most
``MAX_REQUEST`` or ``MAX_ANSWER`` bytes, and, where the JSON says so, that many raw bytes. Nothing
received is executed, and nothing is allocated because somebody says so.

Every exchange has a deadline that grows with its bytes: a peer that is slow beyond use counts as
gone. The proof keeps strangers out; it does not encrypt. Like the training's own traffic it
belongs on a network of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

MAX_REQUEST = 16 << 10
MAX_ANSWER = 4 << 20
BLOCK_BYTES = 1 << 20
SLOWEST_BYTES_PER_S = 2 << 20

_MAGIC = b"checkpoint-peer-1\n"
_CHALLENGE_BYTES = 32


class WireError(OSError):
    """The other side does not speak this protocol, or does not know the token."""


class Wire:
    """One connection. Not for several threads at once."""

    def __init__(
        self,
        connection: socket.socket,
        *,
        timeout_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._monotonic = monotonic
        self._by_s = 0.0
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.expect(0)

    def expect(self, size_bytes: int) -> None:
        """From now on there is time for that many bytes, both ways together."""
        allowed_s = self._timeout_s + size_bytes / SLOWEST_BYTES_PER_S
        self._by_s = self._monotonic() + allowed_s

    def wait(self, timeout_s: float) -> None:
        """From now on there are so many seconds."""
        self._by_s = self._monotonic() + timeout_s

    def send(self, message: Mapping[str, Any]) -> None:
        data = json.dumps(message, allow_nan=False).encode()
        self.send_bytes(len(data).to_bytes(4, "big") + data)

    def send_bytes(self, data: bytes | bytearray | memoryview) -> None:
        self._connection.settimeout(self._left_s())
        self._connection.sendall(data)

    def receive(self, most: int) -> dict[str, Any] | None:
        """The next message; None if the other side closed before one began."""
        length = bytearray(4)
        first = self._receive_some(memoryview(length))
        if first == 0:
            return None
        self.fill(memoryview(length)[first:])
        size = int.from_bytes(length, "big")
        if size > most:
            raise WireError(f"a message of {size} bytes is longer than any")
        data = bytearray(size)
        self.fill(memoryview(data))
        try:
            message = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise WireError("a message is not JSON") from error
        if not isinstance(message, dict):
            raise WireError("a message is not an object")
        return message

    def fill(self, into: memoryview) -> None:
        """Receive exactly as many bytes. Raises ``ConnectionError`` if fewer come."""
        done = 0
        while done < len(into):
            count = self._receive_some(into[done:])
            if count == 0:
                raise ConnectionResetError("the other side closed in the middle")
            done += count

    def cut(self) -> None:
        """From another thread: whoever uses it gets an error, or the end, and closes it.

        Closed under its user's hands, its number would soon be another connection's.
        """
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._connection.close()

    def _receive_some(self, into: memoryview) -> int:
        self._connection.settimeout(self._left_s())
        return self._connection.recv_into(into)

    def _left_s(self) -> float:
        left_s = self._by_s - self._monotonic()
        if left_s <= 0:
            raise TimeoutError("too slow")
        return left_s


def prove_as_client(wire: Wire, token: str) -> None:
    """Raises :class:`WireError` if the server does not know the token."""
    theirs = bytearray(len(_MAGIC) + _CHALLENGE_BYTES)
    wire.fill(memoryview(theirs))
    if not theirs.startswith(_MAGIC):
        raise WireError("it is no memory of a node of this job")
    ours = secrets.token_bytes(_CHALLENGE_BYTES)
    wire.send_bytes(ours + _proof(token, b"client", bytes(theirs), ours))
    proof = bytearray(32)
    try:
        wire.fill(memoryview(proof))
    except ConnectionError as error:
        raise WireError("it does not take this job's token") from error
    if not hmac.compare_digest(bytes(proof), _proof(token, b"server", bytes(theirs), ours)):
        raise WireError("it does not know this job's token")


def prove_as_server(wire: Wire, token: str) -> None:
    """Raises :class:`WireError` if the client does not know the token."""
    ours = _MAGIC + secrets.token_bytes(_CHALLENGE_BYTES)
    wire.send_bytes(ours)
    said = bytearray(_CHALLENGE_BYTES + 32)
    wire.fill(memoryview(said))
    theirs, proof = bytes(said[:_CHALLENGE_BYTES]), bytes(said[_CHALLENGE_BYTES:])
    if not hmac.compare_digest(proof, _proof(token, b"client", ours, theirs)):
        raise WireError("a client does not know the token")
    wire.send_bytes(_proof(token, b"server", ours, theirs))


def _proof(token: str, role: bytes, server: bytes, client: bytes) -> bytes:
    return hmac.new(token.encode(), role + server + client, hashlib.sha256).digest()
