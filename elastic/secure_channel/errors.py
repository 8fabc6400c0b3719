"""Every error that this package raises on purpose; both are of the connection they are raised on.

::

    OSError
    └── ProtocolError             the other end does not keep to the protocol
        └── AuthenticationError   it does not prove that it knows the key
"""

from __future__ import annotations


class ProtocolError(OSError):
    """The other end sends what this protocol does not allow: the connection ends."""


class AuthenticationError(ProtocolError):
    """The other end does not prove that it knows this run's secret."""
