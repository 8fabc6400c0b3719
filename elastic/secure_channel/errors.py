"""Every error that this package raises on purpose; all but the last concern one connection.

::

    OSError
    ├── ProtocolError             the other end violates the protocol
    │   ├── AuthenticationError   it does not prove that it has the key
    │   └── TlsError              only one end uses TLS, or a certificate was rejected
    └── CertificateError          this node's own certificates cannot be used
"""

from __future__ import annotations


class ProtocolError(OSError):
    """The other end violates the protocol: the connection ends."""


class AuthenticationError(ProtocolError):
    """The other end does not prove possession of this run's secret."""


class TlsError(ProtocolError):
    """Only one end uses TLS, or a certificate was rejected."""


class CertificateError(OSError):
    """This node's certificate files cannot be used; ``remedy`` states what to do."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(f"{message}: {remedy}")
        self.message = message
        self.remedy = remedy
