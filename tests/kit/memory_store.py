"""An in-memory store for unit tests in place of etcd, with fault injection.

A :class:`MemoryServer` replaces etcd, a :class:`MemoryStore` is one of its clients. Leases do not
expire with time: a test ends them (:meth:`MemoryServer.expire`).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastic.errors import SYSTEM_CLOCK, CoordinationError, LeaseGone, StoreFull, StoreUnreachable
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

_HISTORY = 1000  # changes that are kept although every watch has read them


@dataclass(frozen=True)
class _Change:
    """One event of the history."""

    key: str
    revision: int
    event: Put | Deleted


class MemoryServer:
    """The data, its history, and the faults. Thread-safe."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.down = False
        self.full = False  # refuses what takes space, like etcd under NOSPACE
        self.cuts = 0  # how often connections were cut
        self.epoch = 0  # grows with every wipe, like a new cluster id
        self.revision = 1  # as in etcd, where the first write gets 2
        self.compacted = 0
        self.entries: dict[str, Entry] = {}
        self.history: list[_Change] = []  # changes that some watch has not read, and a few more
        self.watches: set[MemoryWatch] = set()
        self.leases: set[int] = set()
        self._granted = 0

    # -- faults ----------------------------------------------------------------------------

    def disconnect(self) -> None:
        """Fail every call and disconnect every watch until :meth:`reconnect`."""
        with self.changed:
            self.down = True
            self.cuts += 1
            self.changed.notify_all()

    def reconnect(self) -> None:
        """End a :meth:`disconnect`."""
        with self.changed:
            self.down = False
            self.changed.notify_all()

    def wipe(self) -> None:
        """Replace the store by an empty one: revisions start over, leases are lost."""
        with self.changed:
            self.epoch += 1
            self.cuts += 1
            self.revision, self.compacted = 1, 0
            self.entries, self.history, self.leases = {}, [], set()
            self.changed.notify_all()

    def compact(self) -> None:
        """Compact the history: a watch that is disconnected now cannot resume."""
        with self.changed:
            self.compacted = self.revision

    def expire(self, lease_id: int) -> None:
        """End a lease, as if its owner had died ``ttl_s`` ago."""
        with self.changed:
            self.leases.discard(lease_id)
            keys = [e.key for e in self.entries.values() if e.lease_id == lease_id]
            self.delete_all(keys)

    # -- calls of clients, all under the lock ----------------------------------------------

    def snapshot(self, prefixes: Sequence[str]) -> Snapshot:
        with self.changed:
            found = (e for k, e in sorted(self.entries.items()) if k.startswith(tuple(prefixes)))
            return Snapshot(self.revision, tuple(found))

    def put(self, key: str, value: bytes, lease_id: int) -> int:
        with self.changed:
            if lease_id and lease_id not in self.leases:
                raise LeaseGone(f"put {key}: the lease is gone")
            self._require_space(f"put {key}")
            self.revision += 1
            entry = Entry(key, value, self.revision, lease_id)
            self.entries[key] = entry
            self.history.append(_Change(key, self.revision, Put(entry)))
            self._trim()
            self.changed.notify_all()
            return self.revision

    def delete(self, key: str) -> bool:
        with self.changed:
            return self.delete_all([key] if key in self.entries else [])

    def grant(self) -> int:
        with self.changed:
            self._require_space("grant a lease")
            self._granted += 1
            self.leases.add(self._granted)
            return self._granted

    def _require_space(self, what: str) -> None:
        if self.full:
            raise StoreFull(f"{what}: the memory store is full", hint="free it")

    def _trim(self) -> None:
        """Drop what every watch has read."""
        if len(self.history) > _HISTORY:
            read = min((watch.revision for watch in self.watches), default=self.revision)
            self.history = [change for change in self.history if change.revision > read]

    def delete_all(self, keys: Sequence[str]) -> bool:
        """Delete these keys, which exist, at one revision."""
        if keys:
            self.revision += 1
        for key in keys:
            del self.entries[key]
            self.history.append(_Change(key, self.revision, Deleted(key, self.revision)))
        self.changed.notify_all()
        return bool(keys)


class MemoryStore:
    """Implements :class:`~elastic.store.keyvalue.KeyValue` on a :class:`MemoryServer`."""

    def __init__(self, server: MemoryServer | None = None) -> None:
        self.server = server if server is not None else MemoryServer()
        self._closed = False
        self._watches: list[MemoryWatch] = []
        self._leases: list[MemoryLease] = []

    def get(self, key: str) -> Entry | None:
        with self.server.changed:
            self._check(f"get {key}")
            return self.server.entries.get(key)

    def list(self, prefix: str) -> Snapshot:
        with self.server.changed:
            self._check(f"list {prefix}")
            return self.server.snapshot([prefix])

    def put(self, key: str, value: bytes, *, lease: Lease | None = None) -> int:
        with self.server.changed:
            self._check(f"put {key}")
            return self.server.put(key, value, lease.id if lease is not None else 0)

    def compare_and_swap(
        self,
        key: str,
        value: bytes,
        *,
        expected_revision: int | None,
        lease: Lease | None = None,
        basis: Sequence[tuple[str, int]] = (),
    ) -> int | None:
        with self.server.changed:
            self._check(f"swap {key}")
            if not self._is_unchanged(key, expected_revision, basis):
                return None
            return self.server.put(key, value, lease.id if lease is not None else 0)

    def compare_and_delete(
        self, key: str, *, expected_revision: int | None, basis: Sequence[tuple[str, int]] = ()
    ) -> bool:
        with self.server.changed:
            self._check(f"delete {key}")
            is_unchanged = self._is_unchanged(key, expected_revision, basis)
            return is_unchanged and self.server.delete(key)

    def delete_unchanged(self, keys: Sequence[str], *, revision: int) -> bool:
        with self.server.changed:
            self._check(f"delete {', '.join(keys)}")
            folders = tuple(key for key in keys if key.endswith("/"))
            entries = [
                entry
                for entry in self.server.entries.values()
                if entry.key in keys or entry.key.startswith(folders)
            ]
            if any(entry.mod_revision > revision for entry in entries):
                return False
            self.server.delete_all([entry.key for entry in entries])
            return True

    def delete(self, key: str) -> bool:
        with self.server.changed:
            self._check(f"delete {key}")
            return self.server.delete(key)

    def lease(self, ttl_s: float, *, on_lost: Callable[[], None] | None = None) -> MemoryLease:
        with self.server.changed:
            self._check("grant a lease")
            lease = MemoryLease(self.server, ttl_s, on_lost)
        self._leases = [held for held in self._leases if not held.closed]
        self._leases.append(lease)
        return lease

    def watch(
        self, prefixes: Sequence[str], callback: Callable[[WatchEvent], None], *, name: str
    ) -> Watch:
        if self._closed:
            raise CoordinationError(f"watch {', '.join(prefixes)}: the store is closed")
        watch = MemoryWatch(self.server, prefixes, callback, name)
        self._watches = [w for w in self._watches if w in self.server.watches]
        self._watches.append(watch)
        return watch

    def close(self) -> None:
        watches, self._watches = self._watches, []
        leases, self._leases = self._leases, []
        for watch in watches:
            watch.close()
        for lease in leases:
            lease.close()
        self._closed = True

    def _check(self, what: str) -> None:
        if self._closed:
            raise CoordinationError(f"{what}: the store is closed")
        if self.server.down:
            raise StoreUnreachable(f"{what}: the memory store is disconnected")

    def _is_unchanged(
        self, key: str, expected_revision: int | None, basis: Sequence[tuple[str, int]]
    ) -> bool:
        expected = {} if expected_revision is None else {key: expected_revision}
        expected |= dict(basis)
        return all(self._revision_of(k) == revision for k, revision in expected.items())

    def _revision_of(self, key: str) -> int:
        entry = self.server.entries.get(key)
        return entry.mod_revision if entry else 0


class MemoryLease:
    """A lease that lives until it is closed, expired or wiped away."""

    def __init__(
        self, server: MemoryServer, ttl_s: float, on_lost: Callable[[], None] | None
    ) -> None:
        self._server = server
        self._on_lost = on_lost
        self._id = server.grant()
        self._ttl_s = ttl_s
        self._renewed_s = SYSTEM_CLOCK.boottime()
        self.closed = False
        self._lost = False
        self._thread = threading.Thread(
            target=self._keep, name=f"elastic-lease-{self._id:x}", daemon=True
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
        return self._lost

    @property
    def renewed_s(self) -> float:
        """Now, unless the store is disconnected or has ended the lease."""
        with self._server.changed:
            if not self._server.down and self._id in self._server.leases:
                self._renewed_s = SYSTEM_CLOCK.boottime()
            return self._renewed_s

    def close(self, *, revoke: bool = True) -> None:
        with self._server.changed:
            self.closed = True
            self._server.changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()
        if revoke and not self._lost:
            self._lost = True
            if not self._server.down:
                self._server.expire(self._id)

    def _keep(self) -> None:
        with self._server.changed:
            self._server.changed.wait_for(lambda: self.closed or self._is_gone())
            if self.closed:
                return
            self._lost = True
        if self._on_lost is not None:
            self._on_lost()

    def _is_gone(self) -> bool:
        return not self._server.down and self._id not in self._server.leases


class MemoryWatch:
    """Reads the server's history from its position; its thread calls the callback."""

    def __init__(
        self,
        server: MemoryServer,
        prefixes: Sequence[str],
        callback: Callable[[WatchEvent], None],
        name: str,
    ) -> None:
        self._server = server
        self._prefixes = tuple(prefixes)
        self._callback = callback
        self._epoch: int | None = None  # None: not read yet
        self.revision = 0  # read so far
        self._cuts = server.cuts
        self._connected = True
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"elastic-watch-{name}", daemon=True)
        with server.changed:
            server.watches.add(self)
        self._thread.start()

    def close(self) -> None:
        with self._server.changed:
            self._closed = True
            self._server.watches.discard(self)
            self._server.changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._server.changed:
                batch = self._next_batch()
                while not batch and not self._closed:
                    self._server.changed.wait()
                    batch = self._next_batch()
            for event in batch:
                if self._closed:
                    return
                self._callback(event)
            if self._closed:
                return

    def _next_batch(self) -> list[WatchEvent]:
        """Changes since the last call, as events of a watch."""
        server = self._server
        was_cut, self._cuts = self._cuts != server.cuts, server.cuts
        if was_cut and self._connected and self._epoch is not None:
            self._connected = False
            return [Disconnected("the memory store cut the connection")]
        if server.down:
            return []
        if self._epoch is None:
            return self._start_over("started")
        if self._epoch != server.epoch:
            return self._start_over("wiped")
        if not self._connected and self.revision < server.compacted:
            return self._start_over("compacted")
        resumed: list[WatchEvent] = [] if self._connected else [Reconnected()]
        self._connected = True
        since, self.revision = self.revision, server.revision
        unread = itertools.takewhile(lambda c: c.revision > since, reversed(server.history))
        new = [c.event for c in unread if c.key.startswith(self._prefixes)]
        return resumed + new[::-1]

    def _start_over(self, reason: str) -> list[WatchEvent]:
        self._epoch, self._connected = self._server.epoch, True
        snapshot = self._server.snapshot(self._prefixes)
        self.revision = snapshot.revision
        return [Reset(snapshot, reason)]
