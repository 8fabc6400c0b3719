"""The protocol of secure channels over a plain socket: for tests that say what no client would."""

from __future__ import annotations

import contextlib
import socket
import ssl

from elastic.wire.handshake import HEADER_BYTES, ClientHandshake, SecretKey, ServerHandshake, frame


def receive_exactly(sock: socket.socket, count: int) -> bytes:
    """So many bytes. Raises ConnectionResetError at the end of the stream."""
    data = b""
    while len(data) < count:
        chunk = sock.recv(count - len(data))
        if not chunk:
            raise ConnectionResetError("the stream ended")
        data += chunk
    return data


def receive_frame(sock: socket.socket) -> bytes:
    """The next frame's payload, however long it is."""
    return receive_exactly(sock, int.from_bytes(receive_exactly(sock, HEADER_BYTES), "big"))


def prove(sock: socket.socket, key: SecretKey, identity: str = "") -> str:
    """As a client that knows the key; the server's identity."""
    handshake = ClientHandshake(key, identity)
    sock.sendall(frame(handshake.hello))
    sock.sendall(frame(handshake.answer(receive_frame(sock))))
    return handshake.peer


def serve(sock: socket.socket, key: SecretKey, identity: str) -> str:
    """As a server that knows the key; the client's identity."""
    handshake = ServerHandshake(key, identity)
    sock.sendall(frame(handshake.challenge(receive_frame(sock))))
    handshake.verify(receive_frame(sock))
    return handshake.peer


def is_hung_up_on(sock: socket.socket) -> bool:
    """Wait until the other end closes, whatever it says before."""
    # (SSLError: what TLS says of an end that nobody has announced.)
    with contextlib.suppress(ConnectionResetError, BrokenPipeError, ssl.SSLError):
        while sock.recv(1 << 16):
            pass
    return True
