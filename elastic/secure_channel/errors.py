"""Every error that this package raises on purpose; all but the last are of one connection.

::

    OSError
    ├── ProtocolError             the other end does not keep to the protocol
    │   ├── AuthenticationError   it does not prove that it knows the key
    │   └── TlsError              one end has TLS and the other has not; a certificate was refused
    └── CertificateError          this node's own certificates cannot be used
"""

from __future__ import annotations


class ProtocolError(OSError):
    """The other end sends what this protocol does not allow: the connection ends."""


class AuthenticationError(ProtocolError):
    """The other end does not prove possession of this run's secret."""


class TlsError(ProtocolError):
    """One end has TLS and the other has not, or a certificate was refused."""


class CertificateError(OSError):
    """Files that are to be this node's certificates; ``remedy`` is what to do."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(f"{message}: {remedy}")
        self.message = message
        self.remedy = remedy
