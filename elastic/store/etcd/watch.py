"""A watch that survives reconnects: it delivers every event once, and detects a wiped store.

The watch keeps the last known state of every prefix, and its revision. To resume, it first reads
the prefix *at that old revision* and compares. A store that has not reached the revision, has
another cluster id, or has a different history is not the same store: the watch starts over
("wiped"). Comparing the history matters: a wiped etcd with the same name and addresses has the same
cluster id, and may have passed the old revision before the reconnect; a watch resumed there would
deliver nothing, and no error (docs/explanation/protocol.md, section 5).

Order: every prefix is a separate watcher to etcd, and watchers catch up one after the other
(``syncWatchers`` in etcd's ``mvcc/watchable_store.go``, every 100 ms), while those that have
caught up receive every transaction in order. So for the first second of a connection a change is
delivered only if the prefixes, read at its revision, equal the delivered state with this change.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

from elastic.clock import Clock
from elastic.store.etcd.backoff import pause_s
from elastic.store.etcd.compat import load_grpc, load_rpc
from elastic.store.etcd.connection import EtcdConnection, EtcdConnections
from elastic.store.etcd.failures import CallFailure, Remedy, classify, classify_text
from elastic.store.etcd.followed_prefix import (
    Followed,
    PendingEvent,
    change_of,
    entries_of,
    revision_of,
    without_covered,
)
from elastic.store.etcd.keys import PAGE_KEYS, key_after, range_of
from elastic.store.keyvalue import (
    Disconnected,
    Entry,
    Reconnected,
    Reset,
    Snapshot,
    WatchEvent,
)
from elastic.tuning.agent_intervals import STORE_READ_S, STORE_SETTLING_S


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
