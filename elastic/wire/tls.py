"""TLS between nodes: both ends present a certificate of the job's authority. Only TLS 1.3.

The handshake *inside* TLS proves the peer's identity (:mod:`elastic.wire.handshake`):
nodes are reached by address, and addresses change, so host names in certificates are ignored. TLS
adds confidentiality and integrity, which that handshake does not provide.

Files are checked for every new connection and reloaded when they have changed, as Kubernetes
changes them. If they cannot be used then (half of a pair, an expired certificate), that is
reported, and the previous pair stays in use.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from elastic.wire.base import LOAD_AGAIN_S, CertificateError, LimitedReports, Report, TlsError

SETTINGS = ("node_cacert", "node_cert", "node_key")
SAME_EVERYWHERE = f"set {', '.join(SETTINGS[:2])} and {SETTINGS[2]} on all nodes, or on none"
# A write of at most this size fits into one record, and is sent as a whole.
RECORD_BYTES = 1 << 14
_FLIGHTS = 8  # of a handshake, at most; TLS 1.3 has three
_ALERT = b"\x15\x03\x03\x00\x02\x02\x46"  # fatal: protocol_version (RFC 8446, 6.2)
_RECORD_TYPES = (0x14, 0x15, 0x16, 0x17)
# By error number: X509_verify_cert_error_string(3).
_REMEDIES = {
    9: "check the clock of this machine",
    10: "renew it",
    18: "name the authority that has signed it as node_cacert",
    19: "name the authority that has signed it as node_cacert",
    20: "name the authority that has signed it as node_cacert",
    21: "name the authority that has signed it as node_cacert",
    26: "it needs both extended key usages, server auth and client auth: nodes are both",
}

_Signature = tuple[tuple[int, ...], ...]
_Contexts = tuple[ssl.SSLContext, ssl.SSLContext]


@dataclass(frozen=True)
class TlsFiles:
    """PEM files, by absolute paths. The authority's may hold several certificates."""

    cacert: str
    cert: str
    key: str


class Tls:
    """One node's certificates, for its listeners and its connections. Thread-safe.

    Raises CertificateError if they cannot be used. ``report`` is called when changed files cannot
    be used.
    """

    # No lock, since a forked worker could inherit it locked: two threads that load the same files
    # at once do the same work twice.

    def __init__(
        self,
        files: TlsFiles,
        *,
        report: Report = lambda line: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.files = files
        self._report = LimitedReports(report, monotonic=monotonic)
        self._monotonic = monotonic
        self._signature = _signature_of(files)
        self._contexts = load_contexts(files)
        self._refused: _Signature | None = None
        self._again_at_s = 0.0

    def wrap(self, sock: socket.socket, *, server_side: bool) -> ssl.SSLSocket:
        """Wrap a connected socket, which the result then owns; performs no handshake yet.

        Raises OSError if the connection has ended; it is then closed.
        """
        server, client = self._newest()
        context = server if server_side else client
        return context.wrap_socket(sock, server_side=server_side, do_handshake_on_connect=False)

    def _newest(self) -> _Contexts:
        try:
            signature = _signature_of(self.files)
        except OSError as error:
            self._report(f"the certificates in use are kept: {error}")
            return self._contexts
        if signature == self._signature:
            return self._contexts
        if signature == self._refused and self._monotonic() < self._again_at_s:
            return self._contexts
        try:
            contexts = load_contexts(self.files)
            if _signature_of(self.files) == signature:  # else: the next connection loads again
                self._contexts, self._signature = contexts, signature
        except OSError as error:
            self._refused, self._again_at_s = signature, self._monotonic() + LOAD_AGAIN_S
            self._report(
                f"the changed certificates are not used, the previous ones are kept: {error}"
            )
        return self._contexts


def handshake_step(sock: ssl.SSLSocket) -> int:
    """One step of a handshake without blocking: the selector's event to wait for, 0 once done.

    Raises OSError; the message of a :class:`TlsError` is for users.
    """
    try:
        sock.do_handshake()
    except ssl.SSLError as error:
        if event := awaited_event(error):
            return event
        with contextlib.suppress(OSError):
            # OpenSSL sends no alert to a peer that does not speak TLS (after an alert of its own,
            # this one is not read). Received data must not stay unread: closing would then reset
            # the connection, perhaps before the peer has read the alert.
            if sock.server_side:
                socket.socket.send(sock, _ALERT)
            socket.socket.recv(sock, RECORD_BYTES)
        raise failure(error, is_handshake=True) from None
    return 0


def awaited_event(error: OSError) -> int:
    """The event to wait for before retrying; 0 if the connection has failed."""
    if isinstance(error, ssl.SSLWantReadError):
        return selectors.EVENT_READ
    return selectors.EVENT_WRITE if isinstance(error, ssl.SSLWantWriteError) else 0


def failure(error: ssl.SSLError, *, is_handshake: bool = False) -> OSError:
    """Translate an error of OpenSSL's into one of this package."""
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        message = "the connection was closed"
        if is_handshake:
            message += f" in the TLS handshake (is it a node without TLS? {SAME_EVERYWHERE})"
        return ConnectionResetError(message)
    return TlsError(_explain(error))


def _explain(error: ssl.SSLError) -> str:
    reason = error.reason or str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message}; both need one of node_cacert's"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "it presents no certificate"
    if "ALERT" in reason and ("CERT" in reason or "UNKNOWN_CA" in reason):
        return (
            f"it refuses this node's certificate ({reason}): compare node_cert here with "
            "node_cacert there, and the clocks"
        )
    return f"it does not speak TLS 1.3 as this node does ({reason}): {SAME_EVERYWHERE}"


def is_record(beginning: bytes | bytearray) -> bool:
    """Whether a frame's four bytes of length are the beginning of a TLS record instead."""
    return len(beginning) >= 2 and beginning[0] in _RECORD_TYPES and beginning[1] == 3


def _signature_of(files: TlsFiles) -> _Signature:
    """What changes with the files' content; a link is followed, as Kubernetes changes one."""
    return tuple(
        (status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev, status.st_size)
        for status in (_stat(name, path) for name, path in _named(files))
    )


def _named(files: TlsFiles) -> tuple[tuple[str, str], ...]:
    return tuple(zip(SETTINGS, (files.cacert, files.cert, files.key), strict=True))


def _stat(name: str, path: str) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        raise _unreadable(name, path, error) from None


def _unreadable(name: str, path: str, error: OSError) -> CertificateError:
    return CertificateError(
        f"{name}={path} cannot be read: {error.strerror}", "name a PEM file that this user can read"
    )


def load_contexts(files: TlsFiles) -> _Contexts:
    """The contexts of both roles, after a handshake with each other. Raises CertificateError."""
    for name, path in _named(files):
        try:
            with open(path, "rb") as file:
                file.read(1)
        except OSError as error:
            raise _unreadable(name, path, error) from None
    server, client = (
        _context(files, protocol) for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
    )
    _check_handshake(files, server, client)
    return server, client


def _context(files: TlsFiles, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The authority may be an intermediate one, whose issuer is not given.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # no resumption: certificates are checked every time
    _load_authority(context, SETTINGS[0], files.cacert)
    _load_pair(context, files)
    return context


def _load_authority(context: ssl.SSLContext, name: str, path: str) -> None:
    try:
        context.load_verify_locations(cafile=path)
    except ssl.SSLError as error:
        raise CertificateError(
            f"{name}={path} holds no certificate ({error.reason or error})",
            "name a PEM file of them",
        ) from None
    except OSError as error:
        raise _unreadable(name, path, error) from None


def _load_pair(context: ssl.SSLContext, files: TlsFiles) -> None:
    def refuse_to_ask() -> NoReturn:
        raise CertificateError(
            f"node_key={files.key} is encrypted, and there is no prompt for a password",
            "store it without one, in a file that others cannot read",
        )

    _load_authority(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), SETTINGS[1], files.cert)
    try:
        context.load_cert_chain(files.cert, files.key, password=refuse_to_ask)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise CertificateError(
                f"node_key={files.key} is not the key of node_cert={files.cert}",
                "name a pair that was issued together",
            ) from None
        raise CertificateError(
            f"node_cert={files.cert} with node_key={files.key} cannot be used "
            f"({error.reason or error})",
            "name a PEM certificate and its PEM private key",
        ) from None
    except CertificateError:
        raise
    except OSError as error:
        raise _unreadable(SETTINGS[2], files.key, error) from None


def _check_handshake(files: TlsFiles, server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """Perform a handshake of this node with itself, in memory, which finds every problem that
    another node would find."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    try:
        for _ in range(_FLIGHTS):
            done = [_is_done(end) for end in ends]  # both take a step
            if all(done):
                return
    except ssl.SSLCertVerificationError as error:
        remedy = _REMEDIES.get(error.verify_code, "have another one issued")
        raise CertificateError(
            f"node_cert={files.cert} cannot be used with node_cacert={files.cacert}: "
            f"{error.verify_message}",
            remedy,
        ) from None
    except ssl.SSLError as error:
        raise CertificateError(
            f"node_cert={files.cert} cannot be used for TLS 1.3 ({error.reason})",
            "have another one issued, with an ECDSA or RSA key",
        ) from None
    raise AssertionError("a TLS handshake in memory does not end")


def _is_done(end: ssl.SSLObject) -> bool:
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
