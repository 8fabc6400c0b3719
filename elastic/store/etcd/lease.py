"""A lease that is renewed until etcd reports that it has expired.

A failed renewal is retried, on every endpoint, for the lifetime of the process: only the store
knows whether the lease ended, since a restarted or newly elected etcd leader extends every lease
(and etcd3's own refresh thread, like torch's, dies of one transient error: pytorch#194870).
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from typing import Any

from elastic.clock import Clock
from elastic.errors import CoordinationError
from elastic.store.etcd.backoff import pause_s
from elastic.store.etcd.calls import Calls, Reply
from elastic.store.etcd.compat import load_grpc, load_rpc
from elastic.store.etcd.connection import ROUND_TRIPS, EtcdConnections
from elastic.store.etcd.failures import CallFailure, Remedy, classify
from elastic.tuning.agent_intervals import (
    STORE_LONGEST_RENEWAL_S,
    STORE_REVOKE_S,
    STORE_SHORTEST_RENEWAL_S,
)

# A member may freeze right after a renewal. With these, and a second to detect that, the next
# member is tried after 0.25 + 0.17 of the TTL and a second: in time for the default of 4 s.
_RENEWALS_PER_TTL = 4
_TIMEOUTS_PER_TTL = 6


class EtcdLease:
    """Implements :class:`~elastic.store.keyvalue.Lease` on etcd."""

    def __init__(
        self,
        connections: EtcdConnections,
        calls: Calls,
        clock: Clock,
        ttl_s: float,
        on_lost: Callable[[], None] | None,
        guard: Callable[[Callable[[], None]], Callable[[], None]],
    ) -> None:
        self._connections = connections
        self._calls = calls
        self._clock = clock
        self._rpc = load_rpc()
        self._on_lost = on_lost
        self._lost = threading.Event()
        self._closed = threading.Event()
        self._wake = threading.Event()
        self._stream: Any = None
        self._renewed_s = clock.boottime()
        self._id, self._ttl_s = self._grant(ttl_s)
        self._thread = threading.Thread(
            target=guard(self._keep), name=f"elastic-lease-{self._id:x}", daemon=True
        )
        self._thread.start()

    @property
    def id(self) -> int:
        return self._id

    @property
    def ttl_s(self) -> float:
        return self._ttl_s

    @property
    def lost(self) -> bool:
        return self._lost.is_set()

    @property
    def renewed_s(self) -> float:
        return self._renewed_s

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    @property
    def _timeout_s(self) -> float:
        """Of one renewal."""
        timeout_s = max(self._ttl_s / _TIMEOUTS_PER_TTL, STORE_SHORTEST_RENEWAL_S)
        far_s = min(ROUND_TRIPS * self._connections.round_trip_s, self._ttl_s / 3)
        return max(min(timeout_s, STORE_LONGEST_RENEWAL_S), far_s)

    def renew_now(self) -> None:
        """The lease may have expired: check with etcd at once."""
        self._wake.set()

    def close(self, *, revoke: bool = True) -> None:
        self._closed.set()
        self._wake.set()
        stream = self._stream
        if stream is not None:
            stream.cancel()
        if self._thread is not threading.current_thread():
            self._thread.join()
        if revoke and not self._lost.is_set():
            self._lost.set()
            try:
                self._calls(
                    f"revoke lease {self._id:x}",
                    lambda connection: connection.leases.LeaseRevoke,
                    self._rpc.LeaseRevokeRequest(ID=self._id),
                    timeout_s=STORE_REVOKE_S,
                )
            except CoordinationError:
                return  # best effort: otherwise it expires after the TTL

    def _grant(self, ttl_s: float) -> tuple[int, float]:
        # The client chooses the id, so that a retry after a lost reply finds its own lease.
        lease_id = random.SystemRandom().getrandbits(62) | 1
        reply = self._calls(
            "grant a lease",
            lambda connection: connection.leases.LeaseGrant,
            self._rpc.LeaseGrantRequest(TTL=max(1, math.ceil(ttl_s)), ID=lease_id),
            tolerate=frozenset({Remedy.LEASE_EXISTS}),
        )
        if isinstance(reply, Reply):
            return lease_id, float(reply.message.TTL)
        found = self._calls(
            "look up a lease",
            lambda connection: connection.leases.LeaseTimeToLive,
            self._rpc.LeaseTimeToLiveRequest(ID=lease_id),
        )
        assert isinstance(found, Reply)
        return lease_id, float(found.message.grantedTTL)

    def _keep(self) -> None:
        failures = 0
        while True:
            wait_s = self._ttl_s / _RENEWALS_PER_TTL
            if failures:
                wait_s = min(wait_s, pause_s(failures))
            self._clock.wait(self._wake, wait_s)
            self._wake.clear()
            if self._closed.is_set():
                return
            requested_s = self._clock.boottime()
            try:
                alive = self._renew() or self._confirm()
            except CallFailure:
                failures += 1  # not a loss; the store's last_contact_s has the time
                continue
            failures = 0
            if not alive:
                self._lost.set()
                if self._on_lost is not None:
                    self._on_lost()
                return
            self._renewed_s = requested_s

    def _renew(self) -> bool:
        """One renewal. False: the lease does not exist in etcd. Raises CallFailure."""
        connection = self._connections.current()
        request = self._rpc.LeaseKeepAliveRequest(ID=self._id)
        try:
            self._stream = connection.leases.LeaseKeepAlive(
                iter((request,)), timeout=self._timeout_s, metadata=connection.metadata
            )
            reply = next(iter(self._stream), None)
            self._stream.cancel()
        except (load_grpc().RpcError, ValueError) as error:
            failure = classify(error)
            if not self._closed.is_set():
                self._connections.react(connection, failure)
            raise failure from None
        finally:
            self._stream = None
        if reply is None:
            raise CallFailure(Remedy.RETRY, "the renewal was not answered")
        self._connections.touch()
        return bool(reply.TTL > 0)

    def _confirm(self) -> bool:
        """Check by another request: a lagging new leader may not have a new lease yet."""
        connection = self._connections.current()
        reply = self._connections.invoke(
            connection,
            connection.leases.LeaseTimeToLive,
            self._rpc.LeaseTimeToLiveRequest(ID=self._id),
            self._timeout_s,
        )
        return bool(reply.TTL > 0)
