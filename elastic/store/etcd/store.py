"""The store on etcd v3 (3.4 to 3.6), through etcd3's messages and gRPC stubs.

etcd3 (PyPI) is used rather than a new client, or HTTP, because it contains etcd's complete API. Its
client class is not used: its watcher cannot resume after a reconnect, its lease refresh ends with
the first error, and it supports one endpoint. The parts are in this package: ``connection``
(fail-over), ``calls`` (retries), ``lease``, ``watch``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.errors import CoordinationError, LeaseGone, StoreRefused
from elastic.store.etcd.calls import Calls, Observer, Reply
from elastic.store.etcd.compat import load_rpc
from elastic.store.etcd.connection import EtcdConnection, EtcdConnections
from elastic.store.etcd.endpoints import Endpoint, EtcdConfig, parse_endpoints
from elastic.store.etcd.keys import PAGE_KEYS, bytes_of, entry_of, key_after, range_of
from elastic.store.etcd.lease import EtcdLease
from elastic.store.etcd.watch import EtcdWatch
from elastic.store.keyvalue import Entry, Lease, Snapshot, Watch, WatchEvent
from elastic.tuning.agent_intervals import STORE_SILENCE_S

__all__ = ["Endpoint", "EtcdConfig", "EtcdStore", "parse_endpoints"]


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
        basis: tuple[str, int] | None = None,
    ) -> int | None:
        write = self._rpc.RequestOp(request_put=self._put_request(key, value, lease))
        expected = [] if expected_revision is None else [(key, expected_revision)]
        expected += [] if basis is None else [basis]
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

    def compare_and_delete(self, key: str, *, expected_revision: int) -> bool:
        write = self._rpc.RequestOp(
            request_delete_range=self._rpc.DeleteRangeRequest(key=bytes_of(key))
        )
        expected = [(key, expected_revision)]
        reply = self._if_unchanged(f"delete {key}", key, expected, write, None)
        if reply.message.succeeded:
            return bool(reply.message.responses[0].response_delete_range.deleted)
        # After a lost reply, the version to delete no longer exists: report success.
        return reply.in_doubt and not reply.message.responses[0].response_range.kvs

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
        found = self._call("list alarms", lambda c: c.maintenance.Alarm, request).message.alarms
        return tuple(sorted({str(self._rpc.AlarmType.Name(member.alarm)) for member in found}))

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
