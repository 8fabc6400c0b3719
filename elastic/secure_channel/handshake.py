"""Mutual challenge-response: each end proves possession of the key, and neither sends it.

Three frames. The client's proof travels with its first request, so a connection costs one round
trip before that::

    client → server   hello      magic, client nonce, client identity
    server → client   challenge  magic, server nonce, server identity, proof of the server
    client → server   proof      proof of the client

A proof is HMAC-SHA-256 under the purpose's key of the role ("server", "client") and of the complete
hello and challenge. So a proof is valid for one connection (both nonces are in it), for one role
(it cannot be reflected), for one purpose and one run (they are in the key, see
``keys.SecretKey.derive``), and for the identities that both ends claimed. The shape is that of
SCRAM (RFC 5802) and of ISO 9798-4's three-pass mutual authentication.

No I/O, and no parser: fields are at fixed offsets.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from elastic.secure_channel.errors import AuthenticationError, ProtocolError
from elastic.secure_channel.keys import SecretKey
from elastic.secure_channel.tls import Tls

MAGIC = b"elastic1"
NONCE_BYTES = 32
PROOF_BYTES = 32
MAX_IDENTITY = 128
# The size of a frame of the handshake.
MAX_FRAME = len(MAGIC) + NONCE_BYTES + PROOF_BYTES + MAX_IDENTITY
_IDENTITY_AT = len(MAGIC) + NONCE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What one end of a connection proves to the other."""

    key: Callable[[], SecretKey]  # called for every handshake
    identity: str = ""
    tls: Tls | None = None  # for all connections, in both directions; others are refused


class ClientHandshake:
    """The end that connects. ``expected``: the required identity of the server."""

    def __init__(self, key: SecretKey, identity: str = "", *, expected: str | None = None) -> None:
        self._key = key
        self._expected = expected
        self.hello = _opening(identity)
        self.peer = ""  # the proved identity of the server

    def answer(self, challenge: bytes) -> bytes:
        """The client's proof, once the server's is verified.

        Raises:
            ProtocolError: the server does not speak this protocol, or is not the expected one.
            AuthenticationError: it does not have the key.
        """
        opening, proof = challenge[:-PROOF_BYTES], challenge[-PROOF_BYTES:]
        identity = _identity_of(opening)
        if not hmac.compare_digest(proof, self._key.mac(b"server", self.hello, opening)):
            raise AuthenticationError("it has not proved that it has this run's secret")
        self.peer = identity
        if self._expected is not None and identity != self._expected:
            raise ProtocolError(f"it is now {identity!r}, not {self._expected!r}")
        return self._key.mac(b"client", self.hello, opening)


class ServerHandshake:
    """The end that listens."""

    def __init__(self, key: SecretKey, identity: str = "") -> None:
        self._key = key
        self._opening = _opening(identity)
        self._hello = b""
        self.peer = ""  # the claimed identity of the client; proved after :meth:`verify`

    def challenge(self, hello: bytes) -> bytes:
        """The answer to a client's hello. Raises ProtocolError."""
        self.peer = _identity_of(hello)
        self._hello = hello
        return self._opening + self._key.mac(b"server", hello, self._opening)

    def verify(self, proof: bytes) -> None:
        """Raises AuthenticationError if the client does not have the key."""
        expected = self._key.mac(b"client", self._hello, self._opening)
        if not hmac.compare_digest(proof, expected):
            raise AuthenticationError("it has not proved that it has this run's secret")


def _opening(identity: str) -> bytes:
    raw = identity.encode()
    if len(raw) > MAX_IDENTITY:
        raise ValueError(f"an identity of {len(raw)} bytes, more than {MAX_IDENTITY}")
    return MAGIC + secrets.token_bytes(NONCE_BYTES) + raw


def _identity_of(opening: bytes) -> str:
    if not opening.startswith(MAGIC) or len(opening) < _IDENTITY_AT:
        raise ProtocolError("it does not speak this protocol")
    raw = opening[_IDENTITY_AT:]
    if len(raw) > MAX_IDENTITY:
        raise ProtocolError("it does not speak this protocol")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise ProtocolError("it does not speak this protocol") from None
