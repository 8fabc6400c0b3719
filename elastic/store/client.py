"""The client of etcd: connection, calls with retries, and their failures."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import random
import re
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import tenacity
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.internal import enum_type_wrapper

from elastic.errors import (
    SYSTEM_CLOCK,
    Clock,
    ConfigError,
    CoordinationError,
    LeaseGone,
    StoreFull,
    StoreRefused,
    StoreTooOld,
    StoreUnreachable,
)
from elastic.store.keyvalue import Entry
from elastic.tuning.intervals import (
    STORE_CALL_S,
)
from elastic.tuning.options import AgentOptions

# First contact with a store, without another limit: one call.
STORE_CONNECT_S = STORE_CALL_S
# The longest pause between two attempts (docs/explanation/protocol.md, section 5).
STORE_BACKOFF_CAP_S = 1.0
# The first pause between two attempts; each further one is twice as long, with jitter.
STORE_RETRY_S = 0.05
# The limit of gRPC for one attempt to connect. The store's own limits end attempts earlier, and it
# tries an unanswered connection again: TCP, TLS and HTTP/2 take up to five round trips.
STORE_CONNECTING_S = 20.0
# The first pause between two connections to a member.
STORE_FIRST_BACKOFF_S = 0.1
# A connection to etcd is pinged after this much silence: etcd closes connections that are pinged
# more often than every 5 s (--grpc-keepalive-min-time). The store's own watchdog is faster; this
# detects connections that a middlebox has dropped, with or without pending calls.
STORE_KEEPALIVE_S = 6.0
# A ping without a response in this time ends the connection; the same limit applies, as
# TCP_USER_TIMEOUT, to unacknowledged bytes.
STORE_KEEPALIVE_ANSWER_S = 3.0
# Limit of a call's first attempt; each further one gets twice as long, within the call's limit.
STORE_FIRST_ATTEMPT_S = 1.5
# The shortest attempt: gRPC fails a call whose deadline has passed without sending it.
STORE_MIN_ATTEMPT_S = 0.05
# A member of the cluster that does not respond in this time is not used.
STORE_PROBE_S = 1.0
# The longest limit for a member: each failed round doubles it, for overloaded machines.
STORE_SLOWEST_PROBE_S = 4.0
# The shortest limit for a member when the others need the remaining time: a handshake within one
# network.
STORE_MIN_PROBE_S = 0.1
# Limit of a plain connection that determines why TLS fails.
STORE_DIAGNOSIS_S = 0.5

# ----------------------------------------------------------------------------
# How long to wait after failures of etcd: twice as long after each, with jitter.

_MAX_DOUBLINGS = 10  # far beyond the cap, and no large number


def pause_s(failures: int) -> float:
    """The pause after ``failures`` others in a row: half of it is random, so that the clients of a
    restarted etcd do not all reconnect at once."""
    longest_s = min(STORE_BACKOFF_CAP_S, STORE_RETRY_S * 2 ** min(failures, _MAX_DOUBLINGS))
    return random.uniform(longest_s / 2, longest_s)


# ----------------------------------------------------------------------------
# Import etcd3 0.12.0 with any protobuf from 3.20 on.
#
# The library's generated ``*_pb2`` modules were written by a protoc so old that protobuf 4 and
# later refuse to run them ("Descriptors cannot be created directly"). Its API and its gRPC stubs
# are fine. So the message descriptions, which are constants in those files, are read out with
# ``ast`` without running the files; the classes are built from them in a descriptor pool of their
# own (``kv.proto`` and ``rpc.proto`` are names that other libraries may use, too); and the result
# is put into ``sys.modules`` under the names that etcd3 is about to import.
#
# Nothing is pinned and no environment variable is needed.

_PACKAGE = "etcd3.etcdrpc"
_MODULES = ("kv_pb2", "auth_pb2", "rpc_pb2")  # in order of dependency
_LOCK = threading.Lock()
# Parsing the 5,000 lines of its descriptions for it takes longer than the import of grpc.
_SERIALIZED = re.compile(
    r"""\bserialized_pb=\s*(?:_b\(\s*)?(b?'[^'\\]*(?:\\.[^'\\]*)*')""", re.DOTALL
)


def load_rpc() -> ModuleType:
    """``etcd3.etcdrpc``: etcd's messages and gRPC stubs. Raises ConfigError without etcd3."""
    load_grpc()
    with _LOCK:
        if f"{_PACKAGE}.rpc_pb2" not in sys.modules:
            _register()
        return importlib.import_module(_PACKAGE)


def load_grpc() -> Any:
    """The ``grpc`` module; its C core is kept from writing its own log to stderr.

    It would report every refused connection there, which the store reports itself. A GRPC_VERBOSITY
    set by the user is kept. The variable does not leak to this process's children.
    """
    if "grpc" in sys.modules or "GRPC_VERBOSITY" in os.environ:
        return importlib.import_module("grpc")
    os.environ["GRPC_VERBOSITY"] = "NONE"
    try:
        return importlib.import_module("grpc")
    finally:
        os.environ.pop("GRPC_VERBOSITY", None)


def _register() -> None:
    folder = _package_folder()
    serialized = [_serialized_file(folder / f"{name}.py") for name in _MODULES]
    descriptions = [description for description in serialized if description is not None]
    if len(descriptions) < len(_MODULES):
        return  # a newer etcd3, generated for current protobuf: it needs no help
    pool = descriptor_pool.DescriptorPool()
    for name, description in zip(_MODULES, descriptions, strict=True):
        pool.AddSerializedFile(description)
        module = _build_module(f"{_PACKAGE}.{name}", pool, f"{name.removesuffix('_pb2')}.proto")
        sys.modules[module.__name__] = module


def _package_folder() -> Path:
    spec = importlib.util.find_spec("etcd3")  # of a top-level package: imports nothing
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "the Python package etcd3 is not installed", hint="pip install 'etcd3>=0.12'"
        )
    return Path(next(iter(spec.submodule_search_locations))) / "etcdrpc"


def _serialized_file(path: Path) -> bytes | None:
    """The constant of ``serialized_pb=`` of the file's ``FileDescriptor(...)``."""
    match = _SERIALIZED.search(path.read_text(encoding="utf-8"))
    if match is None:
        return None
    value = ast.literal_eval(match[1])
    # A text is written as _b('...'), which encodes to latin1.
    return value.encode("latin1") if isinstance(value, str) else bytes(value)


def _build_module(name: str, pool: Any, proto: str) -> ModuleType:
    """What protoc would have written: classes, enums and enum values as module attributes."""
    module = ModuleType(name, f"Built from {proto} by {__name__}.")
    description = pool.FindFileByName(proto)
    module.__dict__["DESCRIPTOR"] = description
    for message_name, message in description.message_types_by_name.items():
        module.__dict__[message_name] = _message_class(pool, message)
    for enum_name, enum in description.enum_types_by_name.items():
        module.__dict__[enum_name] = enum_type_wrapper.EnumTypeWrapper(enum)
        module.__dict__.update({value.name: value.number for value in enum.values})
    return module


def _message_class(pool: Any, description: Any) -> Any:
    factory: Any = message_factory  # its names differ between protobuf's versions
    if hasattr(factory, "GetMessageClass"):  # protobuf >= 4.22
        return factory.GetMessageClass(description)
    return factory.MessageFactory(pool).GetPrototype(description)


# ----------------------------------------------------------------------------
# Endpoints and credentials of etcd, validated early.

DEFAULT_PORT = 2379
_HINT = "write host, host:port, [ipv6]:port or http(s)://host:port, separated by commas"
_PATTERN = re.compile(
    r"(?:(?P<scheme>https?)://)?(?:\[(?P<v6>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^\s:/\[\]@?#]+))"
    r"(?::(?P<port>[0-9]+))?/?"
)


class Endpoint(NamedTuple):
    """One etcd member's client address; ``scheme`` is "http", "https" or "" (not given)."""

    host: str
    port: int = DEFAULT_PORT
    scheme: str = ""

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoints(text: str) -> tuple[Endpoint, ...]:
    """Read ``h1:2379,h2,[::1]:2379,https://h3:2379``. Raises ConfigError naming the bad part."""
    parts = [part.strip() for part in text.split(",")]
    endpoints = tuple(dict.fromkeys(_parse_one(part, text) for part in parts if part))
    if not endpoints:
        raise ConfigError(f"no etcd endpoint in --rdzv-endpoint={text!r}", hint=_HINT)
    return endpoints


def _parse_one(part: str, text: str) -> Endpoint:
    match = _PATTERN.fullmatch(part)
    if match is None:
        raise ConfigError(f"etcd endpoint {part!r} (in {text!r}) cannot be read", hint=_HINT)
    port = int(match["port"]) if match["port"] else DEFAULT_PORT
    if not 1 <= port <= 65535:
        raise ConfigError(f"etcd endpoint {part!r}: port {port} is not in 1..65535", hint=_HINT)
    return Endpoint(match["v6"] or match["host"], port, match["scheme"] or "")


@dataclass(frozen=True, kw_only=True)
class EtcdConfig:
    """How to reach etcd. Checked on construction: raises ConfigError naming the values."""

    endpoints: tuple[Endpoint, ...]
    cacert: str | None = None  # PEM file; given, or https:// endpoints: TLS
    cert: str | None = None  # client certificate, PEM file
    key: str | None = None  # its private key, PEM file
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    connect_timeout_s: float = STORE_CONNECT_S  # for the first contact
    request_timeout_s: float = STORE_CALL_S  # for one call, retries included

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ConfigError("no etcd endpoint given", hint=_HINT)
        if bool(self.cert) != bool(self.key):
            given, lacking = ("cert", "key") if self.cert else ("key", "cert")
            raise ConfigError(
                f"{given} is given without {lacking}",
                hint="a client certificate needs both files: cert and key",
            )
        if bool(self.user) != bool(self.password):
            given, lacking = ("user", "password") if self.user else ("password", "user")
            raise ConfigError(
                f"{given} is given without {lacking}", hint="set both, or neither of them"
            )
        self._check_schemes()
        for name in ("connect_timeout_s", "request_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be positive")

    def _check_schemes(self) -> None:
        schemes = {endpoint.scheme for endpoint in self.endpoints}
        if {"http", "https"} <= schemes:
            raise ConfigError(
                f"http:// and https:// are mixed in {', '.join(map(str, self.endpoints))}",
                hint="all members of an etcd cluster use the same scheme",
            )
        if "http" in schemes and (self.cacert or self.cert):
            raise ConfigError(
                f"http:// endpoints with a certificate ({self.cacert or self.cert})",
                hint="write https://, or omit cacert, cert and key",
            )

    @property
    def tls(self) -> bool:
        """Whether connections are encrypted."""
        return bool(self.cacert or self.cert) or any(e.scheme == "https" for e in self.endpoints)


def read_pem(name: str, path: str | None) -> bytes | None:
    """The bytes of a certificate or key file. Raises ConfigError naming option and path."""
    if path is None:
        return None
    try:
        pem = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{name}={path} cannot be read ({error.strerror})",
            hint="give the path of a PEM file that this process may read",
        ) from None
    if b"-----BEGIN " not in pem:
        raise ConfigError(
            f"{name}={path} holds nothing in PEM format",
            hint="PEM files have lines like -----BEGIN CERTIFICATE-----",
        )
    return pem


# ----------------------------------------------------------------------------
# Classifies errors of etcd and gRPC: retry, use another member, log in again, or fail.
#
# gRPC's status codes are too coarse to decide on (UNAVAILABLE is a refused connection, a bad
# certificate, and a cluster without leader), so the text decides where it must. Texts are from
# etcd's ``api/v3rpc/rpctypes/error.go``, unchanged from 3.4 to 3.6.


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


# ----------------------------------------------------------------------------
# One connection to one etcd member at a time, and the fail-over to the next one.
#
# All calls, leases and watches of a store share the *current* connection. When it proves useless
# its channel is closed, which cancels everything in flight on it at once; the next caller connects
# to the next endpoint. A member counts as usable when ``Maintenance.Status`` responds and reports
# a leader: that needs neither a quorum nor a disk, so it distinguishes a dead member from a slow
# cluster.

_OLDEST = (3, 4)
ROUND_TRIPS = 3  # a response may take as many times the round trip of a quiet connection

# gRPC sets TCP_USER_TIMEOUT to the keep-alive's timeout where it sends pings (gRFC A18).
_OPTIONS = (
    ("grpc.keepalive_time_ms", round(STORE_KEEPALIVE_S * 1000)),
    ("grpc.keepalive_timeout_ms", round(STORE_KEEPALIVE_ANSWER_S * 1000)),
    ("grpc.initial_reconnect_backoff_ms", round(STORE_FIRST_BACKOFF_S * 1000)),
    # (Also the limit of the first attempt: with a second, no member at a distance of more than half
    # a second's round trip was ever reached.)
    ("grpc.min_reconnect_backoff_ms", round(STORE_CONNECTING_S * 1000)),
    ("grpc.max_reconnect_backoff_ms", round(STORE_BACKOFF_CAP_S * 1000)),
    ("grpc.enable_http_proxy", 0),  # etcd is never accessed through a web proxy
    ("grpc.use_local_subchannel_pool", 1),  # a closed channel really closes its sockets
    ("grpc.max_receive_message_length", 64 << 20),
)


class EtcdConnection:
    """An open channel to one member, with the stubs in use."""

    def __init__(self, endpoint: Endpoint, channel: Any) -> None:
        rpc = load_rpc()
        self.endpoint = endpoint
        self.channel = channel
        self.kv = rpc.KVStub(channel)
        self.leases = rpc.LeaseStub(channel)
        self.watches = rpc.WatchStub(channel)
        self.auth = rpc.AuthStub(channel)
        self.maintenance = rpc.MaintenanceStub(channel)
        self.token: str | None = None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Every call fails at once on a member that has lost its leader."""
        token = (("token", self.token),) if self.token else ()
        return (("hasleader", "true"), *token)


class EtcdConnections:
    """Hands out the current connection; thread-safe."""

    def __init__(self, config: EtcdConfig, clock: Clock = SYSTEM_CLOCK) -> None:
        self.config = config
        self.last_contact_s = clock.monotonic()
        self.round_trip_s = 0.0  # to the current member, if it takes long
        self._clock = clock
        self._rpc = load_rpc()
        self._credentials = _credentials(config)
        self._connecting = threading.Lock()  # held while a round of attempts runs
        self._state = threading.Lock()  # guards the fields below, never held across I/O
        self._current: EtcdConnection | None = None
        self._next = 0  # index of the endpoint to try first
        self._rounds = 0  # failed rounds so far
        self._failed_in_a_row = 0
        self._reasons: dict[Endpoint, CallFailure] = {}
        # That did not answer in time, and may still be connecting: each is tried once more.
        self._unanswered: dict[Endpoint, EtcdConnection] = {}
        self._closed = False

    # -- for callers -----------------------------------------------------------------------

    def current(self, ends_s: float | None = None) -> EtcdConnection:
        """The current connection, created now if there is none: one attempt per endpoint.

        All of them end by ``ends_s`` (monotonic), if given. Raises CallFailure; the reasons are
        then in :meth:`error`.
        """
        rounds = self._rounds
        connection = self._current
        if connection is not None:
            return connection
        with self._connecting:
            with self._state:
                if self._closed:
                    raise CallFailure(Remedy.FATAL, "the store is closed")
                if self._current is not None:
                    return self._current
                if self._rounds != rounds:  # another thread tried while this one waited
                    raise self._worst()
            return self._try_all(ends_s)

    def invoke(
        self,
        connection: EtcdConnection,
        method: Callable[..., Any],
        request: Any,
        timeout_s: float,
    ) -> Any:
        """One attempt of a unary call. Raises CallFailure, after :meth:`react`."""
        try:
            reply = method(request, timeout=timeout_s, metadata=connection.metadata)
        except (load_grpc().RpcError, ValueError) as error:
            failure = classify(error)
            self.react(connection, failure)
            raise failure from None
        self.touch()
        return reply

    def react(self, connection: EtcdConnection, failure: CallFailure) -> None:
        """React to a failure of the connection: check it, close it, log in."""
        if failure.remedy is Remedy.MOVE:
            self.drop(connection, failure)
        elif failure.remedy is Remedy.DOUBT:
            self.verify(connection)
        elif failure.remedy is Remedy.LOGIN and connection.token is not None:
            try:
                self._log_in(connection, STORE_PROBE_S)
            except CallFailure as refused:
                self.drop(connection, refused)

    def verify(self, connection: EtcdConnection) -> bool:
        """Check that the member is alive and has a leader; drop it if not."""
        alone = len(self.config.endpoints) == 1  # no other member to use: wait longer
        try:
            self._status(connection, 2 * self._probe_s if alone else self._probe_s)
        except CallFailure as failure:
            self.drop(connection, failure)
            return False
        self.touch()
        return True

    @property
    def _probe_s(self) -> float:
        """The time in which a member must respond: limits for one site would find no member at the
        other end of the world alive."""
        return max(STORE_PROBE_S, ROUND_TRIPS * self.round_trip_s)

    def drop(self, connection: EtcdConnection, failure: CallFailure) -> None:
        """Close the connection and let the next user try the next endpoint."""
        with self._state:
            self._reasons[connection.endpoint] = failure
            if self._current is connection:
                self._current = None
                self._next = self.config.endpoints.index(connection.endpoint) + 1
        connection.channel.close()

    def touch(self) -> None:
        """Note that etcd just answered."""
        self.last_contact_s = self._clock.monotonic()

    def peek(self) -> EtcdConnection | None:
        """The current connection if there is one; connects to nothing."""
        return self._current

    def close(self) -> None:
        """Close the channel; every call from now on fails."""
        with self._state:
            self._closed = True
            connection, self._current = self._current, None
        if connection is not None:
            connection.channel.close()
        self._close_unanswered()

    def _close_unanswered(self) -> None:
        with self._state:
            unanswered, self._unanswered = self._unanswered, {}
        for connection in unanswered.values():
            connection.channel.close()

    # -- errors, for users -----------------------------------------------------------------

    def error(self, what: str, last: CallFailure) -> StoreUnreachable | StoreRefused | StoreTooOld:
        """The error to raise when ``what`` failed permanently: every endpoint with its reason."""
        with self._state:
            reasons = dict(self._reasons)
            if self._current is not None:  # connected, but the call has failed
                reasons.setdefault(self._current.endpoint, last)
        tried = "; ".join(
            f"{endpoint}: {reasons[endpoint].reason if endpoint in reasons else 'not tried'}"
            for endpoint in self.config.endpoints
        )
        remedies = {failure.remedy for failure in reasons.values()}
        if Remedy.NOT_ETCD in remedies:
            return StoreTooOld(
                f"{what}: no etcd of version 3.4 or later ({tried})",
                hint="check --rdzv-endpoint: an older etcd answers like this, and so do proxies "
                "and other servers; etcd 3.4 or later is needed",
            )
        if Remedy.REFUSED in remedies:
            return StoreRefused(
                f"{what}: etcd refused ({tried})",
                hint="check cacert, cert, key, user and password, and the user's role in etcd",
            )
        return StoreUnreachable(
            f"{what}: no etcd endpoint answers ({tried})",
            hint="check --rdzv-endpoint, that etcd runs, and that a majority of its members is up",
        )

    @property
    def hopeless(self) -> bool:
        """Whether every endpoint has refused this client, twice in a row."""
        with self._state:
            remedies = [f.remedy for f in self._reasons.values()]
            tried_all = len(remedies) == len(self.config.endpoints) and self._failed_in_a_row >= 2
        return tried_all and all(r in (Remedy.REFUSED, Remedy.NOT_ETCD) for r in remedies)

    # -- one round over the endpoints ------------------------------------------------------

    def _try_all(self, ends_s: float | None) -> EtcdConnection:
        endpoints = self.config.endpoints
        patience_s = min(STORE_PROBE_S * 2 ** min(self._failed_in_a_row, 10), STORE_SLOWEST_PROBE_S)
        for step in range(len(endpoints)):
            endpoint = endpoints[(self._next + step) % len(endpoints)]
            timeout_s = patience_s
            if ends_s is not None:  # leave each of the others its share of the time
                left_s = (ends_s - self._clock.monotonic()) / (len(endpoints) - step)
                timeout_s = max(STORE_MIN_PROBE_S, min(patience_s, left_s))
            try:
                connection = self._try(endpoint, timeout_s)
            except CallFailure as failure:
                self._note(endpoint, failure)
                continue
            with self._state:
                if self._closed:
                    connection.channel.close()
                    raise CallFailure(Remedy.FATAL, "the store is closed")
                self._current = connection
                self._failed_in_a_row = 0
                self._reasons.pop(endpoint, None)
            self._close_unanswered()
            return connection
        with self._state:
            self._rounds += 1
            self._failed_in_a_row += 1
            self._next = (self._next + 1) % len(endpoints)
            raise self._worst()

    def _note(self, endpoint: Endpoint, failure: CallFailure) -> None:
        with self._state:
            known = self._reasons.get(endpoint)
            if known is None or known.remedy is not failure.remedy or known.remedy != Remedy.DOUBT:
                self._reasons[endpoint] = failure  # of several timeouts report the first one

    def _worst(self) -> CallFailure:
        """The error for a caller that gets no connection."""
        reasons = "; ".join(f"{e}: {f.reason}" for e, f in self._reasons.items())
        return CallFailure(Remedy.MOVE, reasons or "no endpoint answers")

    def _try(self, endpoint: Endpoint, timeout_s: float) -> EtcdConnection:
        with self._state:
            connection = self._unanswered.pop(endpoint, None)
        is_first = connection is None
        if connection is None:
            connection = EtcdConnection(endpoint, self._open_channel(str(endpoint)))
        try:
            begun_s = self._clock.monotonic()
            self._status(connection, timeout_s)
            connected_s = self._clock.monotonic()
            self.round_trip_s = 0.0
            if connected_s - begun_s > STORE_PROBE_S / 4:  # that includes the handshakes
                self._status(connection, STORE_SLOWEST_PROBE_S)
                self.round_trip_s = self._clock.monotonic() - connected_s
            if self.config.user:
                self._log_in(connection, timeout_s)
        except CallFailure as failure:
            with self._state:
                is_kept = is_first and failure.remedy is Remedy.DOUBT and not self._closed
                if is_kept:
                    self._unanswered[endpoint] = connection
            if not is_kept:
                connection.channel.close()
            raise explain(failure, endpoint, tls=self.config.tls, timeout_s=timeout_s) from None
        self.touch()
        return connection

    def _open_channel(self, target: str) -> Any:
        grpc = load_grpc()
        if self._credentials is None:
            return grpc.insecure_channel(target, options=_OPTIONS)
        return grpc.secure_channel(target, self._credentials, options=_OPTIONS)

    def _status(self, connection: EtcdConnection, timeout_s: float) -> None:
        try:
            status = connection.maintenance.Status(self._rpc.StatusRequest(), timeout=timeout_s)
        except (load_grpc().RpcError, ValueError) as error:
            raise classify(error) from None
        check_version(status.version)
        if not status.leader:
            raise CallFailure(Remedy.MOVE, "the member has no leader (is a majority up?)")

    def _log_in(self, connection: EtcdConnection, timeout_s: float) -> None:
        request = self._rpc.AuthenticateRequest(
            name=self.config.user, password=self.config.password
        )
        try:
            # etcd hashes with bcrypt, which is slow on purpose: not a sign of a dead member.
            reply = connection.auth.Authenticate(request, timeout=timeout_s + 2)
        except (load_grpc().RpcError, ValueError) as error:
            failure = classify(error)
            if "authentication is not enabled" in failure.reason:
                return
            raise failure from None
        connection.token = reply.token


def check_version(version: str) -> None:
    """Raises CallFailure(NOT_ETCD) for anything before etcd 3.4."""
    match = re.match(r"v?(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) < _OLDEST:
        raise CallFailure(Remedy.NOT_ETCD, f"etcd {version or 'of unknown version'}, before 3.4")


def _credentials(config: EtcdConfig) -> Any:
    """gRPC's channel credentials, or None without TLS. Raises ConfigError on unreadable files."""
    if not config.tls:
        return None
    return load_grpc().ssl_channel_credentials(
        root_certificates=read_pem("cacert", config.cacert),
        private_key=read_pem("key", config.key),
        certificate_chain=read_pem("cert", config.cert),
    )


# ----------------------------------------------------------------------------
# Unary calls with retries: tenacity decides when, this module what and for how long.

Observer = Callable[[str, float, bool], None]
"""Called with the purpose of a request, its duration in seconds, and whether it has failed."""

_AGAIN = frozenset({Remedy.RETRY, Remedy.DOUBT, Remedy.MOVE, Remedy.LOGIN})


@dataclass(frozen=True)
class Reply:
    """etcd's response, and whether an earlier attempt may have been executed, too."""

    message: Any
    in_doubt: bool


class Calls:
    """Makes unary calls on the current connection; thread-safe."""

    def __init__(self, connections: EtcdConnections, clock: Clock, closed: threading.Event) -> None:
        self._connections = connections
        self._clock = clock
        self._closed = closed  # ends the pauses between attempts
        self.observer: Observer | None = None

    def __call__(
        self,
        what: str,
        method: Callable[[EtcdConnection], Callable[..., Any]],
        request: Any,
        *,
        timeout_s: float | None = None,
        tolerate: frozenset[Remedy] = frozenset(),
    ) -> Reply | CallFailure:
        """Call until etcd responds or the time is up.

        Returns a CallFailure only if its remedy is in ``tolerate``; raises CoordinationError.
        """
        began_s, has_failed = self._clock.monotonic(), True
        try:
            reply = self._until_answered(what, method, request, timeout_s, tolerate)
            has_failed = False
            return reply
        finally:
            if self.observer is not None:
                self.observer(what, self._clock.monotonic() - began_s, has_failed)

    def _until_answered(
        self,
        what: str,
        method: Callable[[EtcdConnection], Callable[..., Any]],
        request: Any,
        timeout_s: float | None,
        tolerate: frozenset[Remedy],
    ) -> Reply | CallFailure:
        limit_s = self._connections.config.request_timeout_s if timeout_s is None else timeout_s
        ends_s = self._clock.monotonic() + limit_s
        sent, answered = 0, None  # the last attempt that etcd itself answered with an error

        def attempt() -> Reply:
            nonlocal sent, answered
            connection = self._connections.current(ends_s)
            left_s = max(ends_s - self._clock.monotonic(), STORE_MIN_ATTEMPT_S)
            in_doubt = sent > 0
            sent += 1
            patience_s = min(left_s, STORE_FIRST_ATTEMPT_S * 2 ** (sent - 1))
            try:
                message = self._connections.invoke(
                    connection, method(connection), request, patience_s
                )
            except CallFailure as failure:
                answered = failure if failure.remedy is Remedy.RETRY else answered
                raise
            return Reply(message, in_doubt)

        try:
            return self._retrying(limit_s)(attempt)
        except CallFailure as failure:
            if failure.remedy in tolerate:
                return failure
            # The last attempt had only the remaining time, so its timeout is not the cause.
            cause = answered if failure.remedy is Remedy.DOUBT else None
            raise self._error(what, cause or failure) from None

    def _retrying(self, limit_s: float) -> tenacity.Retrying:
        def wait(state: tenacity.RetryCallState) -> float:
            wanted_s = pause_s(state.attempt_number - 1)
            return max(0.0, min(wanted_s, limit_s - (state.seconds_since_start or 0.0)))

        return tenacity.Retrying(
            retry=tenacity.retry_if_exception(self._worth_retrying),
            stop=tenacity.stop_after_delay(limit_s),
            wait=wait,
            sleep=self._pause,
            reraise=True,
        )

    def _pause(self, seconds: float) -> None:
        self._clock.wait(self._closed, seconds)

    def _worth_retrying(self, error: BaseException) -> bool:
        return (
            isinstance(error, CallFailure)
            and error.remedy in _AGAIN
            and not self._closed.is_set()
            and not self._connections.hopeless
        )

    def _error(self, what: str, failure: CallFailure) -> CoordinationError:
        if failure.remedy is Remedy.LEASE_GONE:
            return LeaseGone(f"{what}: the lease is gone")
        if failure.remedy is Remedy.REFUSED:
            return StoreRefused(
                f"{what}: etcd refused: {failure.reason}",
                hint="check user and password, and the user's role in etcd",
            )
        if failure.remedy is Remedy.FULL:
            return StoreFull(
                f"{what}: etcd is full (NOSPACE), and refuses all writes ({failure.reason})",
                hint="free it: `etcdctl compact REVISION` with the revision in `etcdctl endpoint "
                "status -w json`, then `etcdctl defrag` on each member and `etcdctl alarm disarm`; "
                "raise its --quota-backend-bytes",
            )
        if failure.remedy in _AGAIN or failure.remedy is Remedy.NOT_ETCD:
            return self._connections.error(what, failure)
        return CoordinationError(f"{what}: {failure.reason}")


# ----------------------------------------------------------------------------
# Converts keys, ranges and entries to and from etcd's messages.

_CODEC = ("utf-8", "surrogateescape")  # other keys need not be UTF-8, and are returned unchanged


def bytes_of(key: str) -> bytes:
    """The key as etcd stores it."""
    return key.encode(*_CODEC)


def key_of(key: bytes) -> str:
    """The key as this package names it."""
    return key.decode(*_CODEC)


def range_of(prefix: str) -> tuple[bytes, bytes]:
    """``key`` and ``range_end`` that cover every key starting with ``prefix``.

    >>> range_of("/elastic/")
    (b'/elastic/', b'/elastic0')
    >>> range_of("")
    (b'\\x00', b'\\x00')
    """
    start = bytes_of(prefix)
    if not start:
        return b"\0", b"\0"  # in etcd: from the first key, to the last
    end = start.rstrip(b"\xff")
    return start, end[:-1] + bytes((end[-1] + 1,)) if end else b"\0"


PAGE_KEYS = 500  # a reply is limited to 64 MiB, and a record to 1.5


def key_after(key: bytes) -> bytes:
    """The start of the page after the one that ends with ``key``."""
    return key + b"\0"


def entry_of(kv: Any) -> Entry:
    """An ``mvccpb.KeyValue`` as an Entry."""
    return Entry(key_of(kv.key), kv.value, kv.mod_revision, kv.lease)


# ----------------------------------------------------------------------------
# The etcd configuration in an agent's options: certificates, user, password file.


def etcd_config(endpoint: str, options: AgentOptions) -> EtcdConfig:
    """The configuration of the store. ``endpoint`` is torchrun's: ``HOST:PORT`` or several.

    Raises:
        ConfigError: an endpoint is invalid, or the password file cannot be read.
    """
    return EtcdConfig(
        endpoints=parse_endpoints(endpoint),
        cacert=options.cacert,
        cert=options.cert,
        key=options.key,
        user=options.user,
        password=_password(options),
        connect_timeout_s=options.connect_timeout_s,
    )


def _password(options: AgentOptions) -> str | None:
    if options.password_file is None:
        return None
    try:
        return Path(options.password_file).read_text().rstrip("\r\n")
    except OSError as error:
        raise ConfigError(
            f"password_file={options.password_file} cannot be read: {error.strerror}",
            hint="name a file that holds the password and nothing else",
        ) from None
