"""One connection to one etcd member at a time, and the fail-over to the next one.

All calls, leases and watches of a store share the *current* connection. When it proves useless its
channel is closed, which cancels everything in flight on it at once; the next caller connects to the
next endpoint. A member counts as usable when ``Maintenance.Status`` responds and reports a leader:
that needs neither a quorum nor a disk, so it distinguishes a dead member from a slow cluster.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.errors import StoreRefused, StoreTooOld, StoreUnreachable
from elastic.store.etcd.compat import load_grpc, load_rpc
from elastic.store.etcd.endpoints import Endpoint, EtcdConfig, read_pem
from elastic.store.etcd.failures import CallFailure, Remedy, classify, explain
from elastic.tuning.agent_intervals import (
    STORE_BACKOFF_CAP_S,
    STORE_CONNECTING_S,
    STORE_FIRST_BACKOFF_S,
    STORE_KEEPALIVE_ANSWER_S,
    STORE_KEEPALIVE_S,
    STORE_MIN_PROBE_S,
    STORE_PROBE_S,
    STORE_SLOWEST_PROBE_S,
)

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
