"""Keys, frames and the handshake of a channel."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass

from elastic.wire.base import AuthenticationError, ProtocolError, TlsError
from elastic.wire.tls import SAME_EVERYWHERE, Tls, is_record

# ----------------------------------------------------------------------------
# Messages on a stream: four bytes of length, and as many bytes. Never more than the limit.

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


# ----------------------------------------------------------------------------
# Secret keys, and keys derived from them: one for each purpose, so that none serves another.

KEY_BYTES = 32
_LABEL = b"torch-elastic-harness key 1"


class SecretKey:
    """32 secret bytes. Its ``repr`` does not show them, and it cannot be pickled by accident.

    >>> SecretKey.generate()
    SecretKey(…)
    >>> key = SecretKey(bytes(32))
    >>> key.derive("store") == key.derive("store"), key.derive("store") == key.derive("memory")
    (True, False)
    """

    __slots__ = ("_raw",)

    def __init__(self, raw: bytes) -> None:
        if len(raw) != KEY_BYTES:
            raise ValueError(f"a key of {len(raw)} bytes, expected {KEY_BYTES}")
        self._raw = raw

    @classmethod
    def generate(cls) -> SecretKey:
        """A fresh one, from the operating system's generator."""
        return cls(secrets.token_bytes(KEY_BYTES))

    @classmethod
    def parse(cls, text: str) -> SecretKey:
        """From :attr:`text`. Raises ValueError, which does not quote it."""
        try:
            return cls(base64.b64decode(text.encode("ascii"), validate=True))
        except (binascii.Error, UnicodeEncodeError):
            raise ValueError("a key that is not base64") from None

    @property
    def text(self) -> str:
        """As base64, for a record or a private file."""
        return base64.b64encode(self._raw).decode()

    def derive(self, *labels: str) -> SecretKey:
        """The key for one purpose: it reveals neither this one nor keys of other purposes."""
        parts = [_LABEL, *(label.encode() for label in labels)]
        return SecretKey(self.mac(b"", *parts))

    def mac(self, role: bytes, *parts: bytes) -> bytes:
        """HMAC-SHA-256 over all parts, each prefixed by its length: different lists give different
        input."""
        digest = hmac.new(self._raw, digestmod=hashlib.sha256)
        for part in (role, *parts):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
        return digest.digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SecretKey) and hmac.compare_digest(self._raw, other._raw)

    def __hash__(self) -> int:
        return hash(self._raw)

    def __repr__(self) -> str:
        return "SecretKey(…)"

    def __reduce__(self) -> str:
        raise TypeError("a secret key cannot be pickled: pass its text in a private file")


# ----------------------------------------------------------------------------
# Mutual challenge-response: each end proves possession of the key, and neither sends it.
#
# Three frames. The client's proof travels with its first request, so a connection costs one round
# trip before that::
#
#     client → server   hello      magic, client nonce, client identity
#     server → client   challenge  magic, server nonce, server identity, proof of the server
#     client → server   proof      proof of the client
#
# A proof is HMAC-SHA-256 under the purpose's key of the role ("server", "client") and of the
# complete hello and challenge. So a proof is valid for one connection (both nonces are in it), for
# one role (it cannot be reflected), for one purpose and one run (they are in the key, see
# ``keys.SecretKey.derive``), and for the identities that both ends claimed. The shape is that of
# SCRAM (RFC 5802) and of ISO 9798-4's three-pass mutual authentication.
#
# No I/O, and no parser: fields are at fixed offsets.

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
