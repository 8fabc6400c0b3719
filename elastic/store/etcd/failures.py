"""Classifies errors of etcd and gRPC: retry, use another member, log in again, or fail.

gRPC's status codes are too coarse to decide on (UNAVAILABLE is a refused connection, a bad
certificate, and a cluster without leader), so the text decides where it must. Texts are from
etcd's ``api/v3rpc/rpctypes/error.go``, unchanged from 3.4 to 3.6.
"""

from __future__ import annotations

import socket
import ssl
from enum import Enum
from typing import Any

from elastic.store.etcd.endpoints import Endpoint
from elastic.tuning.agent_intervals import STORE_DIAGNOSIS_S


class Remedy(Enum):
    """The reaction to a failed call."""

    RETRY = "retry"  # the same member, a moment later
    DOUBT = "doubt"  # no answer in time: check whether the member is alive
    MOVE = "move"  # another member: this connection is of no use
    LOGIN = "login"  # a new token
    REFUSED = "refused"  # invalid certificate, user or password
    LEASE_GONE = "lease gone"
    LEASE_EXISTS = "lease exists"
    COMPACTED = "compacted"
    FUTURE = "future"  # a revision that this store has not reached
    NOT_ETCD = "not etcd"
    FULL = "full"  # etcd reads, renews and deletes, and refuses all writes until it has been freed
    FATAL = "fatal"  # etcd rejects the request


class CallFailure(Exception):
    """One failed attempt; ``str()`` is the reason. Never leaves this package."""

    def __init__(self, remedy: Remedy, reason: str) -> None:
        super().__init__(reason)
        self.remedy = remedy
        self.reason = reason


_BY_TEXT = (
    ("invalid auth token", Remedy.LOGIN),
    ("revision of auth store is old", Remedy.LOGIN),
    ("requested lease not found", Remedy.LEASE_GONE),
    ("lease already exists", Remedy.LEASE_EXISTS),
    ("revision has been compacted", Remedy.COMPACTED),
    ("revision is a future revision", Remedy.FUTURE),
    ("authentication failed", Remedy.REFUSED),
    ("user name is empty", Remedy.REFUSED),
    ("user name not found", Remedy.REFUSED),
    ("permission denied", Remedy.REFUSED),
    ("database space exceeded", Remedy.FULL),
    ("no leader", Remedy.MOVE),
    ("server stopped", Remedy.MOVE),
    ("not capable", Remedy.MOVE),
    ("too many requests", Remedy.RETRY),
    ("leader changed", Remedy.RETRY),
    ("request timed out", Remedy.RETRY),
    ("etcdserver: timed out", Remedy.RETRY),
    ("CERTIFICATE_VERIFY_FAILED", Remedy.REFUSED),
    ("Hostname Verification Check failed", Remedy.REFUSED),
    ("is not in peer certificate", Remedy.REFUSED),
)
_BY_CODE = {
    "UNAVAILABLE": Remedy.MOVE,
    "CANCELLED": Remedy.MOVE,  # this client closed the channel during the call
    "INTERNAL": Remedy.MOVE,
    "UNKNOWN": Remedy.MOVE,
    "ABORTED": Remedy.RETRY,
    "RESOURCE_EXHAUSTED": Remedy.RETRY,
    "DEADLINE_EXCEEDED": Remedy.DOUBT,
    "UNAUTHENTICATED": Remedy.LOGIN,
    "PERMISSION_DENIED": Remedy.REFUSED,
    "UNIMPLEMENTED": Remedy.NOT_ETCD,
}


_UNRESOLVED = ("DNS", "name resolution", "lookup", "not known", "Domain name")
_SILENT = ("imed out", "timeout", "SETTINGS")  # TCP may have connected, but got no answer


def classify(error: Any) -> CallFailure:
    """Classify a ``grpc.RpcError`` (or the ValueError of a call on a closed channel)."""
    if isinstance(error, ValueError):
        return CallFailure(Remedy.MOVE, "the connection was closed")
    code, text = error.code().name, error.details() or ""
    return classify_text(text or code, otherwise=_BY_CODE.get(code, Remedy.FATAL))


def classify_text(text: str, *, otherwise: Remedy = Remedy.RETRY) -> CallFailure:
    """Classify an error that is only text, like the reason of a cancelled watch."""
    for part, remedy in _BY_TEXT:
        if part in text:
            return CallFailure(remedy, text)
    return CallFailure(otherwise, text)


def explain(
    failure: CallFailure, endpoint: Endpoint, *, tls: bool, timeout_s: float
) -> CallFailure:
    """Why the first contact failed, for users; distinguishes TLS errors from a dead host."""
    if failure.remedy is Remedy.DOUBT or any(part in failure.reason for part in _SILENT):
        return CallFailure(Remedy.DOUBT, f"no answer within {timeout_s:.2g} s")
    if "Hostname Verification" in failure.reason or "peer certificate" in failure.reason:
        return CallFailure(
            Remedy.REFUSED, f"the server's certificate is not made out to {endpoint.host}"
        )
    if "CERTIFICATE_VERIFY_FAILED" in failure.reason:
        return CallFailure(Remedy.REFUSED, "the server's certificate is not signed by cacert")
    if failure.remedy is not Remedy.MOVE:
        return failure
    if "Connection refused" in failure.reason:
        return CallFailure(Remedy.MOVE, "connection refused")
    if any(part in failure.reason for part in _UNRESOLVED):
        return CallFailure(Remedy.MOVE, f"the name {endpoint.host!r} cannot be resolved")
    if "no leader" in failure.reason:
        return failure
    return _explain_handshake(failure, endpoint, tls=tls)


def _explain_handshake(failure: CallFailure, endpoint: Endpoint, *, tls: bool) -> CallFailure:
    """TCP works and gRPC does not: find out whether the two sides agree on TLS."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection(endpoint[:2], timeout=STORE_DIAGNOSIS_S) as plain:
            plain.settimeout(STORE_DIAGNOSIS_S)
            with context.wrap_socket(plain, server_hostname=endpoint.host):
                speaks_tls = True
    except ssl.SSLError as error:
        speaks_tls = "ALERT" in str(error.reason)  # it refused the connection with a TLS alert
    except OSError:
        return CallFailure(failure.remedy, _first_line(failure.reason))
    if tls and not speaks_tls:
        return CallFailure(Remedy.REFUSED, "the server does not speak TLS")
    if speaks_tls and not tls:
        return CallFailure(Remedy.REFUSED, "the server speaks TLS: cacert (or https://) is needed")
    if tls:
        return CallFailure(
            Remedy.REFUSED,
            f"the TLS handshake failed: certificate not accepted ({_first_line(failure.reason)})",
        )
    return CallFailure(failure.remedy, _first_line(failure.reason))


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0][:300] if text.strip() else "no reason given"
