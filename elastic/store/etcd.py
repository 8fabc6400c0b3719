"""The key-value store in etcd: leases, watches, and a prefix that is followed."""

from __future__ import annotations

import contextlib
import math
import queue
import random
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.errors import SYSTEM_CLOCK, Clock, CoordinationError, LeaseGone, StoreRefused
from elastic.store.client import (
    PAGE_KEYS,
    ROUND_TRIPS,
    CallFailure,
    Calls,
    Endpoint,
    EtcdConfig,
    EtcdConnection,
    EtcdConnections,
    Observer,
    Remedy,
    Reply,
    bytes_of,
    classify,
    classify_text,
    entry_of,
    key_after,
    key_of,
    load_grpc,
    load_rpc,
    pause_s,
    range_of,
)
from elastic.store.keyvalue import (
    Deleted,
    Disconnected,
    Entry,
    Lease,
    Put,
    Reconnected,
    Reset,
    Snapshot,
    Watch,
    WatchEvent,
)
from elastic.tuning.intervals import (
    STORE_SILENCE_S,
)

# A read that brings a watch up to date.
STORE_READ_S = 2.0
# After a watch was recreated, messages within this time may be older than the state read.
STORE_SETTLING_S = 1.0
# The renewal of a lease gets a share of the length of the lease, but at least this.
STORE_SHORTEST_RENEWAL_S = 0.3
# The longest limit of a renewal, for any length of the lease: after that, another member is tried.
STORE_LONGEST_RENEWAL_S = 1.5
# To revoke a lease when an agent ends; otherwise the lease expires.
STORE_REVOKE_S = 1.0

# ----------------------------------------------------------------------------
# A watch's state of one prefix, and its validation against the store.


@dataclass(eq=False)
class Followed:
    """One watched prefix as last delivered to its callback: the entries, and their revision."""

    prefix: str
    revision: int = 0
    entries: dict[str, Entry] = field(default_factory=dict)

    def apply(self, change: Put | Deleted) -> None:
        """Record a change that is being delivered."""
        self.revision = revision_of(change)
        if isinstance(change, Put):
            self.entries[change.entry.key] = change.entry
        else:
            self.entries.pop(change.key, None)

    def would_be(self, changes: Iterable[Put | Deleted], entries: dict[str, Entry]) -> bool:
        """Whether these further changes lead to exactly these entries."""
        revisions = {entry.key: entry.mod_revision for entry in self.entries.values()}
        for change in changes:
            if isinstance(change, Put):
                revisions[change.entry.key] = change.entry.mod_revision
            else:
                revisions.pop(change.key, None)
        return revisions == {entry.key: entry.mod_revision for entry in entries.values()}

    def contradicts(self, entries: dict[str, Entry]) -> bool:
        """Whether a later state of the prefix contradicts the delivered changes."""
        return any(
            entry.mod_revision <= self.revision and self.entries.get(key) != entry
            for key, entry in entries.items()
        )


@dataclass(frozen=True)
class PendingEvent:
    """A change from etcd that has not been delivered yet."""

    followed: Followed
    change: Put | Deleted


def revision_of(change: Put | Deleted) -> int:
    """The revision of the transaction that made the change."""
    return change.entry.mod_revision if isinstance(change, Put) else change.mod_revision


def change_of(event: Any) -> Put | Deleted:
    """An ``mvccpb.Event`` as this package's event."""
    if event.type == event.DELETE:
        return Deleted(key_of(event.kv.key), event.kv.mod_revision)
    return Put(entry_of(event.kv))


def entries_of(kvs: Any) -> dict[str, Entry]:
    """A range's ``mvccpb.KeyValue``s by key."""
    return {entry.key: entry for entry in map(entry_of, kvs)}


def without_covered(prefixes: Sequence[str]) -> list[str]:
    """Drop prefixes that another one covers, so that no event is delivered twice.

    >>> without_covered(["/a/b", "/c", "/a", "/a"])
    ['/a', '/c']
    """
    kept: list[str] = []
    for prefix in sorted(set(prefixes)):
        if not any(prefix.startswith(other) for other in kept):
            kept.append(prefix)
    return kept


# ----------------------------------------------------------------------------
# A lease that is renewed until etcd reports that it has expired.
#
# A failed renewal is retried, on every endpoint, for the lifetime of the process: only the store
# knows whether the lease ended, since a restarted or newly elected etcd leader extends every lease
# (and etcd3's own refresh thread, like torch's, dies of one transient error: pytorch#194870).

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
        known = self._calls(
            "look up a lease",
            lambda connection: connection.leases.LeaseTimeToLive,
            self._rpc.LeaseTimeToLiveRequest(ID=lease_id),
        )
        assert isinstance(known, Reply)
        return lease_id, float(known.message.grantedTTL)

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


# ----------------------------------------------------------------------------
# A watch that survives reconnects: it delivers every event once, and detects a wiped store.
#
# The watch keeps the last known state of every prefix, and its revision. To resume, it first reads
# the prefix *at that old revision* and compares. A store that has not reached the revision, has
# another cluster id, or has a different history is not the same store: the watch starts over
# ("wiped"). Comparing the history matters: a wiped etcd with the same name and addresses has the
# same cluster id, and may have passed the old revision before the reconnect; a watch resumed there
# would deliver nothing, and no error (docs/explanation/protocol.md, section 5).
#
# Order: every prefix is a separate watcher to etcd, and watchers catch up one after the other
# (``syncWatchers`` in etcd's ``mvcc/watchable_store.go``, every 100 ms), while those that have
# caught up receive every transaction in order. So for the first second of a connection a change is
# delivered only if the prefixes, read at its revision, equal the delivered state with this change.


class EtcdWatch:
    """Implements :class:`~elastic.store.keyvalue.Watch` on etcd."""

    def __init__(
        self,
        connections: EtcdConnections,
        clock: Clock,
        prefixes: Sequence[str],
        callback: Callable[[WatchEvent], None],
        name: str,
        guard: Callable[[Callable[[], None]], Callable[[], None]],
    ) -> None:
        self._connections = connections
        self._clock = clock
        self._callback = callback
        self._rpc = load_rpc()
        self._followed = [Followed(prefix) for prefix in without_covered(prefixes)]
        self._cluster_id: int | None = None  # None: nothing is known yet
        self._connected = True  # until the first Reset there is nothing to be cut off from
        self._failures = 0
        self._settled_at_s = 0.0
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._stream: Any = None
        self._thread = threading.Thread(
            target=guard(self._run), name=f"elastic-watch-{name}", daemon=True
        )
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            if self._stream is not None:
                self._stream.cancel()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._follow()
            except CallFailure as failure:
                if self._connected and self._cluster_id is not None:
                    self._connected = False
                    self._emit(Disconnected(str(failure)))
                wait_s = pause_s(self._failures)
                self._failures += 1
                self._clock.wait(self._closed, wait_s)

    def _follow(self) -> None:
        """Connect, verify that it is the same store, follow until something breaks."""
        connection = self._connections.current()
        reason = self._why_start_over(connection)
        if reason is not None:
            self._start_over(connection, reason)
        with contextlib.closing(self._responses(connection)) as responses:
            self._read(connection, responses)

    def _responses(self, connection: EtcdConnection) -> Generator[Any, None, None]:
        """etcd's messages on a new stream, until it breaks. Raises only CallFailure.

        A generator, so that an exception of the callback is not mistaken for one of the stream.
        """
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for followed in self._followed:
            requests.put(self._create_request(followed))
        try:
            stream = connection.watches.Watch(
                iter(requests.get, None), metadata=connection.metadata
            )
            with self._lock:
                self._stream = stream
                if self._closed.is_set():
                    stream.cancel()
            for response in stream:
                self._connections.touch()
                if response.canceled:
                    # A passed compaction is detected and reported by _why_start_over.
                    raise classify_text(response.cancel_reason or "etcd cancelled the watch")
                yield response
            raise CallFailure(Remedy.MOVE, "etcd ended the watch")
        except (load_grpc().RpcError, ValueError) as error:
            failure = classify(error)
            self._react(connection, failure)
            raise failure from None
        except CallFailure as failure:
            self._react(connection, failure)
            raise
        finally:
            requests.put(None)  # ends gRPC's thread that reads the requests
            with self._lock:
                if self._stream is not None:
                    self._stream.cancel()
                self._stream = None

    def _react(self, connection: EtcdConnection, failure: CallFailure) -> None:
        if not self._closed.is_set():  # closing cancels the stream, which is not a failure
            self._connections.react(connection, failure)

    # -- is it still the same store? -------------------------------------------------------

    def _why_start_over(self, connection: EtcdConnection) -> str | None:
        if self._cluster_id is None:
            return "started"
        for followed in self._followed:
            try:
                header, kvs = self._range(connection, followed.prefix, revision=followed.revision)
            except CallFailure as failure:
                if failure.remedy is Remedy.FUTURE:
                    return "wiped"
                if failure.remedy is Remedy.COMPACTED:
                    return "compacted"
                raise
            same = entries_of(kvs) == followed.entries
            if header.cluster_id != self._cluster_id or not same:
                return "wiped"
        return None

    def _start_over(self, connection: EtcdConnection, reason: str) -> None:
        """List everything at one revision, and continue from that state."""
        header, listed = self._read_all(connection)
        if reason == "compacted" and (
            header.cluster_id != self._cluster_id
            or any(
                f.contradicts(entries) for f, entries in zip(self._followed, listed, strict=True)
            )
        ):
            reason = "wiped"
        for followed, entries in zip(self._followed, listed, strict=True):
            followed.revision, followed.entries = header.revision, entries
        self._cluster_id = header.cluster_id
        everything = sorted((e for entries in listed for e in entries.values()), key=_by_key)
        self._connected = True
        self._emit(Reset(Snapshot(header.revision, tuple(everything)), reason))

    def _read_all(
        self, connection: EtcdConnection, *, revision: int = 0
    ) -> tuple[Any, list[dict[str, Entry]]]:
        """All prefixes at one revision: now, or an earlier one that this member has delivered.

        Of an earlier revision only the keys' revisions are needed: values are left out.
        """
        is_past, listed, header = revision > 0, [], None
        for followed in self._followed:
            first, kvs = self._range(
                connection,
                followed.prefix,
                revision=revision,
                serializable=is_past,
                keys_only=is_past,
            )
            header = header or first
            revision = revision or first.revision
            listed.append(entries_of(kvs))
        return header, listed

    def _range(
        self, connection: EtcdConnection, prefix: str, *, revision: int, **more: bool
    ) -> tuple[Any, list[Any]]:
        """A prefix at one revision (0: now), in pages, and the header of the first reply."""
        key, end = range_of(prefix)
        kvs: list[Any] = []
        header = None
        while True:
            request = self._rpc.RangeRequest(
                key=key, range_end=end, revision=revision, limit=PAGE_KEYS, **more
            )
            reply = self._connections.invoke(connection, connection.kv.Range, request, STORE_READ_S)
            header = header or reply.header
            revision = revision or header.revision
            kvs += reply.kvs
            if not reply.more:
                return header, kvs
            key = key_after(reply.kvs[-1].key)

    # -- following -------------------------------------------------------------------------

    def _create_request(self, followed: Followed) -> Any:
        key, end = range_of(followed.prefix)
        return self._rpc.WatchRequest(
            create_request=self._rpc.WatchCreateRequest(
                key=key, range_end=end, start_revision=followed.revision + 1
            )
        )

    def _read(self, connection: EtcdConnection, responses: Iterable[Any]) -> None:
        """Deliver events in order. Raises CallFailure at the end of the stream."""
        watched: dict[int, Followed] = {}
        undelivered: list[PendingEvent] = []
        for response in responses:
            if response.created:  # in the order of the requests
                watched[response.watch_id] = self._followed[len(watched)]
                if len(watched) == len(self._followed):
                    self._established()
            undelivered += [
                PendingEvent(watched[response.watch_id], change_of(e)) for e in response.events
            ]
            if len(watched) == len(self._followed) and self._in_order(connection, undelivered):
                self._deliver(undelivered)
                undelivered = []

    def _in_order(self, connection: EtcdConnection, undelivered: Sequence[PendingEvent]) -> bool:
        """Whether no earlier change of another prefix can still arrive."""
        settled = self._clock.monotonic() >= self._settled_at_s
        if len(self._followed) == 1 or settled or not undelivered:
            return True
        newest = max(revision_of(one.change) for one in undelivered)
        _, listed = self._read_all(connection, revision=newest)
        return all(
            followed.would_be((u.change for u in undelivered if u.followed is followed), entries)
            for followed, entries in zip(self._followed, listed, strict=True)
        )

    def _established(self) -> None:
        self._failures = 0
        self._settled_at_s = self._clock.monotonic() + STORE_SETTLING_S
        if not self._connected:
            self._connected = True
            self._emit(Reconnected())

    def _deliver(self, undelivered: list[PendingEvent]) -> None:
        known = {id(followed): followed.revision for followed in self._followed}
        for one in sorted(undelivered, key=lambda one: revision_of(one.change)):
            if revision_of(one.change) > known[id(one.followed)]:
                one.followed.apply(one.change)
                self._emit(one.change)

    def _emit(self, event: WatchEvent) -> None:
        if not self._closed.is_set():
            self._callback(event)


def _by_key(entry: Entry) -> str:
    return entry.key


# ----------------------------------------------------------------------------
# The store on etcd v3 (3.4 to 3.6), through etcd3's messages and gRPC stubs.
#
# etcd3 (PyPI) is used rather than a new client, or HTTP, because it contains etcd's complete API.
# Its client class is not used: its watcher cannot resume after a reconnect, its lease refresh ends
# with the first error, and it supports one endpoint. The parts are in this package: ``connection``
# (fail-over), ``calls`` (retries), ``lease``, ``watch``.


def _conditions(
    key: str, expected_revision: int | None, basis: Sequence[tuple[str, int]]
) -> list[tuple[str, int]]:
    """Keys, and the mod revisions that they must have."""
    expected = [] if expected_revision is None else [(key, expected_revision)]
    return [*expected, *basis]


class EtcdStore:
    """Implements :class:`~elastic.store.keyvalue.KeyValue` on etcd.

    The constructor makes the first contact and verifies read access. Raises ConfigError
    (unreadable certificate file), StoreUnreachable (after ``connect_timeout_s``, naming every
    endpoint with its reason), StoreRefused, StoreTooOld.

    ``on_crash(thread name, error)`` is called if a background thread ends by an exception
    (of a callback, or a bug); without it the exception goes to ``threading.excepthook``.
    """

    def __init__(
        self,
        config: EtcdConfig,
        *,
        clock: Clock = SYSTEM_CLOCK,
        on_crash: Callable[[str, BaseException], None] | None = None,
    ) -> None:
        self._rpc = load_rpc()
        self._clock = clock
        self._on_crash = on_crash
        self._closed = threading.Event()
        self._connections = EtcdConnections(config, clock)
        self._calls = Calls(self._connections, clock, self._closed)
        self._lock = threading.Lock()
        self._closing = False
        self._watches: list[EtcdWatch] = []
        self._leases: list[EtcdLease] = []
        try:
            self._prove_access()
        except BaseException:
            self._connections.close()
            raise
        self._silence_thread = threading.Thread(
            target=self._guard(self._watch_silence), name="elastic-etcd-watchdog", daemon=True
        )
        self._silence_thread.start()

    def observe(self, observer: Observer) -> None:
        """Call it after every request, on the thread that made it; it must not block or raise."""
        self._calls.observer = observer

    @property
    def last_contact_s(self) -> float:
        """When etcd last responded (``clock.monotonic()``): since then it may be unreachable.
        Without a problem, at most about two seconds ago."""
        return self._connections.last_contact_s

    @property
    def endpoint(self) -> Endpoint | None:
        """The member in use, or None while there is none."""
        connection = self._connections.peek()
        return connection.endpoint if connection else None

    # -- keys ------------------------------------------------------------------------------

    def get(self, key: str) -> Entry | None:
        request = self._rpc.RangeRequest(key=bytes_of(key))
        kvs = self._call(f"get {key}", lambda c: c.kv.Range, request).message.kvs
        return entry_of(kvs[0]) if kvs else None

    def list(self, prefix: str) -> Snapshot:
        """In pages, all of the first page's revision."""
        key, end = range_of(prefix)
        revision, kvs = 0, []
        while True:
            request = self._rpc.RangeRequest(
                key=key, range_end=end, limit=PAGE_KEYS, revision=revision
            )
            message = self._call(f"list {prefix}", lambda c: c.kv.Range, request).message
            revision = revision or message.header.revision
            kvs += message.kvs
            if not message.more:
                return Snapshot(revision, tuple(map(entry_of, kvs)))
            key = key_after(message.kvs[-1].key)

    def put(self, key: str, value: bytes, *, lease: Lease | None = None) -> int:
        request = self._put_request(key, value, lease)
        reply = self._call(f"put {key}", lambda c: c.kv.Put, request, lease=lease)
        return int(reply.message.header.revision)

    def compare_and_swap(
        self,
        key: str,
        value: bytes,
        *,
        expected_revision: int | None,
        lease: Lease | None = None,
        basis: Sequence[tuple[str, int]] = (),
    ) -> int | None:
        write = self._rpc.RequestOp(request_put=self._put_request(key, value, lease))
        expected = _conditions(key, expected_revision, basis)
        reply = self._if_unchanged(f"swap {key}", key, expected, write, lease)
        if reply.message.succeeded:
            return int(reply.message.header.revision)
        kvs = reply.message.responses[0].response_range.kvs
        if reply.in_doubt and kvs:
            # An earlier attempt's reply was lost: if the value is this one, it was written then.
            now = entry_of(kvs[0])
            if now.value == value and now.lease_id == (lease.id if lease else 0):
                return now.mod_revision
        return None

    def compare_and_delete(
        self, key: str, *, expected_revision: int | None, basis: Sequence[tuple[str, int]] = ()
    ) -> bool:
        write = self._rpc.RequestOp(
            request_delete_range=self._rpc.DeleteRangeRequest(key=bytes_of(key))
        )
        expected = _conditions(key, expected_revision, basis)
        reply = self._if_unchanged(f"delete {key}", key, expected, write, None)
        if reply.message.succeeded:
            return bool(reply.message.responses[0].response_delete_range.deleted)
        # After a lost reply, the version to delete no longer exists: report success.
        return reply.in_doubt and not reply.message.responses[0].response_range.kvs

    def delete_unchanged(self, keys: Sequence[str], *, revision: int) -> bool:
        rpc = self._rpc
        ranges = [range_of(key) if key.endswith("/") else (bytes_of(key), b"") for key in keys]
        older = [
            rpc.Compare(
                key=start,
                range_end=end,
                target=rpc.Compare.MOD,
                result=rpc.Compare.LESS,
                mod_revision=revision + 1,
            )
            for start, end in ranges
        ]
        deletions = [
            rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=start, range_end=end))
            for start, end in ranges
        ]
        request = rpc.TxnRequest(compare=older, success=deletions)
        reply = self._call(f"delete {', '.join(keys)}", lambda c: c.kv.Txn, request)
        return bool(reply.message.succeeded)

    def delete(self, key: str) -> bool:
        request = self._rpc.DeleteRangeRequest(key=bytes_of(key))
        reply = self._call(f"delete {key}", lambda c: c.kv.DeleteRange, request)
        return bool(reply.message.deleted) or reply.in_doubt

    # -- the server ------------------------------------------------------------------------

    def version(self) -> str:
        """The version of the etcd member in use."""
        request = self._rpc.StatusRequest()
        reply = self._call("ask for the version", lambda c: c.maintenance.Status, request)
        return str(reply.message.version)

    def alarms(self) -> tuple[str, ...]:
        """Alarms of all members, like ``NOSPACE``: a member that has one refuses writes."""
        request = self._rpc.AlarmRequest(action=self._rpc.AlarmRequest.GET)
        members = self._call("list alarms", lambda c: c.maintenance.Alarm, request).message.alarms
        return tuple(sorted({str(self._rpc.AlarmType.Name(member.alarm)) for member in members}))

    # -- leases and watches ----------------------------------------------------------------

    def lease(self, ttl_s: float, *, on_lost: Callable[[], None] | None = None) -> EtcdLease:
        self._refuse_when_closing("grant a lease")
        lease = EtcdLease(self._connections, self._calls, self._clock, ttl_s, on_lost, self._guard)
        with self._lock:
            # (Terms of leadership and lost leases come and go for the life of the process.)
            self._leases = [kept for kept in self._leases if not (kept.lost or kept.closed)]
            self._leases.append(lease)
        return lease

    def watch(
        self, prefixes: Sequence[str], callback: Callable[[WatchEvent], None], *, name: str
    ) -> Watch:
        self._refuse_when_closing(f"watch {', '.join(prefixes)}")
        watch = EtcdWatch(self._connections, self._clock, prefixes, callback, name, self._guard)
        with self._lock:
            self._watches = [kept for kept in self._watches if not kept.closed]
            self._watches.append(watch)
        return watch

    def close(self) -> None:
        with self._lock:
            self._closing = True
            watches, self._watches = self._watches, []
            leases, self._leases = self._leases, []
        for watch in watches:
            watch.close()
        for lease in leases:
            lease.close()
        self._closed.set()
        if self._silence_thread is not threading.current_thread():
            self._silence_thread.join()
        self._connections.close()

    def _refuse_when_closing(self, what: str) -> None:
        if self._closing:  # its thread would never be joined
            raise CoordinationError(f"{what}: the store is closed")

    # -- parts -----------------------------------------------------------------------------

    def _prove_access(self) -> None:
        """Connect and read something, so that an invalid user is refused now and not later."""
        config = self._connections.config
        try:
            self._calls(
                "connect",
                lambda c: c.kv.Range,
                self._rpc.RangeRequest(key=b"/", count_only=True),
                timeout_s=config.connect_timeout_s,
            )
        except StoreRefused as error:
            if "permission denied" not in error.message:  # a user may be confined to a prefix
                raise

    def _call(
        self,
        what: str,
        method: Callable[[EtcdConnection], Callable[..., Any]],
        request: Any,
        *,
        lease: Lease | None = None,
    ) -> Reply:
        try:
            reply = self._calls(what, method, request)
        except LeaseGone:
            if isinstance(lease, EtcdLease):
                lease.renew_now()  # its thread notices and notifies its owner
            raise
        assert isinstance(reply, Reply)
        return reply

    def _put_request(self, key: str, value: bytes, lease: Lease | None) -> Any:
        lease_id = lease.id if lease is not None else 0
        return self._rpc.PutRequest(key=bytes_of(key), value=value, lease=lease_id)

    def _if_unchanged(
        self,
        what: str,
        key: str,
        expected: Sequence[tuple[str, int]],
        write: Any,
        lease: Lease | None,
    ) -> Reply:
        """Execute ``write`` if the expected keys have these mod revisions, else read ``key``."""
        rpc = self._rpc
        conditions = [
            rpc.Compare(
                key=bytes_of(expected_key),
                target=rpc.Compare.MOD,
                result=rpc.Compare.EQUAL,
                mod_revision=revision,
            )
            for expected_key, revision in expected
        ]
        read = rpc.RequestOp(request_range=rpc.RangeRequest(key=bytes_of(key)))
        request = rpc.TxnRequest(compare=conditions, success=[write], failure=[read])
        return self._call(what, lambda c: c.kv.Txn, request, lease=lease)

    def _watch_silence(self) -> None:
        """A member that stops answering keeps its TCP connections: check it, and drop it."""
        while not self._clock.wait(self._closed, STORE_SILENCE_S / 4):
            connection = self._connections.peek()
            silent_s = self._clock.monotonic() - self._connections.last_contact_s
            if connection is not None and silent_s > STORE_SILENCE_S:
                self._connections.verify(connection)

    def _guard(self, run: Callable[[], None]) -> Callable[[], None]:
        """Wrap a thread's function so that its owner is notified of its death."""

        def guarded() -> None:
            try:
                run()
            except BaseException as error:
                if self._on_crash is None:
                    raise
                self._on_crash(threading.current_thread().name, error)

        return guarded
