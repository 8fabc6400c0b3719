"""A watch that survives its connection: no event lost, none twice, a wiped store noticed.

The watch keeps what it last knew of every prefix, and at which revision. To resume, it first
reads the prefix *at that old revision* and compares. A store that has not reached the revision,
has another cluster id, or remembers another past is not the one we knew: everything starts over
("wiped"). Comparing the past matters: a wiped etcd with the same name and addresses has the same
cluster id, and may have passed the old revision before we come back; a watch resumed there would
deliver nothing, and no error (PROTOCOL section 3).

Order: exact within one prefix. Across prefixes also by revision, except while a watch catches
up after a reconnect: etcd catches up watcher by watcher.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.clock import Clock
from elastic.coordination.etcd_calls import BACKOFF_CAP_S
from elastic.coordination.etcd_compat import load_grpc, load_rpc
from elastic.coordination.etcd_connection import Connection, Connections
from elastic.coordination.etcd_failures import Failure, Remedy, classify, classify_text
from elastic.coordination.etcd_keys import entry_of, key_of, range_of
from elastic.coordination.keyvalue import (
    Deleted,
    Disconnected,
    Entry,
    Put,
    Reconnected,
    Reset,
    Snapshot,
    WatchEvent,
)

_READ_TIMEOUT_S = 2.0


@dataclass
class _Followed:
    """One prefix: what was last known of it, and at which revision."""

    prefix: str
    revision: int = 0
    entries: dict[str, Entry] = field(default_factory=dict)


class EtcdWatch:
    """Implements :class:`~elastic.coordination.keyvalue.Watch` on etcd."""

    def __init__(
        self,
        connections: Connections,
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
        self._followed = [_Followed(prefix) for prefix in without_covered(prefixes)]
        self._cluster_id: int | None = None  # None: nothing is known yet
        self._connected = True  # until the first Reset there is nothing to be cut off from
        self._failures = 0
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._stream: Any = None
        self._thread = threading.Thread(
            target=guard(self._run), name=f"elastic-watch-{name}", daemon=True
        )
        self._thread.start()

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
            except Failure as failure:
                if self._connected and self._cluster_id is not None:
                    self._connected = False
                    self._emit(Disconnected(str(failure)))
                longest_s = min(BACKOFF_CAP_S, 0.05 * 2 ** min(self._failures, 10))
                self._failures += 1
                self._clock.wait(self._closed, random.uniform(longest_s / 2, longest_s))

    def _follow(self) -> None:
        """Connect, make sure that it is the store we knew, follow until something breaks."""
        connection = self._connections.current()
        reason = self._why_start_over(connection)
        if reason is not None:
            self._start_over(connection, reason)
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
            self._read(stream)
        except (load_grpc().RpcError, ValueError) as error:
            failure = classify(error)
            if not self._closed.is_set():
                self._connections.react(connection, failure)
            raise failure from None
        except Failure as failure:
            self._connections.react(connection, failure)
            raise
        finally:
            requests.put(None)  # ends gRPC's thread that reads the requests
            with self._lock:
                if self._stream is not None:
                    self._stream.cancel()
                self._stream = None

    # -- is it still the store we knew? ----------------------------------------------------

    def _why_start_over(self, connection: Connection) -> str | None:
        if self._cluster_id is None:
            return "started"
        for followed in self._followed:
            try:
                reply = self._range(connection, followed.prefix, revision=followed.revision)
            except Failure as failure:
                if failure.remedy is Remedy.FUTURE:
                    return "wiped"
                if failure.remedy is Remedy.COMPACTED:
                    return "compacted"
                raise
            remembered = {entry.key: entry for entry in map(entry_of, reply.kvs)}
            if reply.header.cluster_id != self._cluster_id or remembered != followed.entries:
                return "wiped"
        return None

    def _start_over(self, connection: Connection, reason: str) -> None:
        """List everything at one revision and make that the new knowledge."""
        rpc = self._rpc
        reads = [
            rpc.RequestOp(request_range=rpc.RangeRequest(key=k, range_end=end))
            for k, end in (range_of(followed.prefix) for followed in self._followed)
        ]
        reply = self._connections.invoke(
            connection, connection.kv.Txn, rpc.TxnRequest(success=reads), _READ_TIMEOUT_S
        )
        revision, cluster_id = reply.header.revision, reply.header.cluster_id
        listed = [
            {entry.key: entry for entry in map(entry_of, response.response_range.kvs)}
            for response in reply.responses
        ]
        if reason == "compacted" and (
            cluster_id != self._cluster_id or any(map(_contradicts, self._followed, listed))
        ):
            reason = "wiped"
        for followed, entries in zip(self._followed, listed, strict=True):
            followed.revision, followed.entries = revision, entries
        self._cluster_id = cluster_id
        everything = sorted(
            (entry for entries in listed for entry in entries.values()), key=lambda e: e.key
        )
        self._connected = True
        self._emit(Reset(Snapshot(revision, tuple(everything)), reason))

    def _range(self, connection: Connection, prefix: str, *, revision: int) -> Any:
        key, end = range_of(prefix)
        request = self._rpc.RangeRequest(key=key, range_end=end, revision=revision)
        return self._connections.invoke(connection, connection.kv.Range, request, _READ_TIMEOUT_S)

    # -- following -------------------------------------------------------------------------

    def _create_request(self, followed: _Followed) -> Any:
        key, end = range_of(followed.prefix)
        return self._rpc.WatchRequest(
            create_request=self._rpc.WatchCreateRequest(
                key=key, range_end=end, start_revision=followed.revision + 1
            )
        )

    def _read(self, stream: Any) -> None:
        """Deliver events; those that come before all prefixes are watched wait till then."""
        watched: dict[int, _Followed] = {}
        early: list[tuple[_Followed, Any]] = []
        for response in stream:
            self._connections.touch()
            if response.canceled:
                # A passed compaction is found again, and told, by _why_start_over.
                raise classify_text(response.cancel_reason or "the watch was cancelled by etcd")
            if response.created:  # in the order of the requests
                watched[response.watch_id] = self._followed[len(watched)]
                if len(watched) == len(self._followed):
                    self._established()
                    for followed, held_back in early:
                        self._deliver(followed, held_back)
                    early = []
            if response.events:
                if len(watched) < len(self._followed):
                    early.append((watched[response.watch_id], response.events))
                else:
                    self._deliver(watched[response.watch_id], response.events)
        raise Failure(Remedy.MOVE, "etcd ended the watch")

    def _established(self) -> None:
        self._failures = 0
        if not self._connected:
            self._connected = True
            self._emit(Reconnected())

    def _deliver(self, followed: _Followed, events: Any) -> None:
        known = followed.revision  # one transaction may bring several events of one revision
        for event in events:
            if event.kv.mod_revision <= known:
                continue
            followed.revision = event.kv.mod_revision
            if event.type == event.DELETE:
                key = key_of(event.kv.key)
                followed.entries.pop(key, None)
                self._emit(Deleted(key, event.kv.mod_revision))
            else:
                entry = entry_of(event.kv)
                followed.entries[entry.key] = entry
                self._emit(Put(entry))

    def _emit(self, event: WatchEvent) -> None:
        if not self._closed.is_set():
            self._callback(event)


def without_covered(prefixes: Sequence[str]) -> list[str]:
    """Drop prefixes that another one covers: no event may come twice."""
    kept: list[str] = []
    for prefix in sorted(set(prefixes)):
        if not any(prefix.startswith(other) for other in kept):
            kept.append(prefix)
    return kept


def _contradicts(followed: _Followed, entries: dict[str, Entry]) -> bool:
    """Whether the store tells another story of the time up to ``followed.revision``."""
    return any(
        entry.mod_revision <= followed.revision and followed.entries.get(key) != entry
        for key, entry in entries.items()
    )
