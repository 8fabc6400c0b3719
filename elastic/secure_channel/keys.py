"""Secret keys, and keys derived from them: one for each purpose, so that none serves another."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets

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
