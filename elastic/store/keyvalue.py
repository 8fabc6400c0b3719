"""The store protocol: the operations that coordination needs, with two implementations.

``etcd.EtcdStore`` uses etcd v3; ``MemoryStore`` (``kit.memory_store`` of the tests) does
the same within one process. One contract suite (tests/contract) runs on both.

Keys and values are ``str`` and ``bytes``. Revisions are etcd's: one counter for the complete
store that grows by one with every write transaction; ``0`` is "the key does not exist".
Every call raises :class:`~elastic.errors.CoordinationError` (``StoreUnreachable`` once the
retries of ``timeout_s`` are used up) and nothing else on problems with the store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Entry:
    """One key and its value."""

    key: str
    value: bytes
    mod_revision: int
    lease_id: int = 0


@dataclass(frozen=True)
class Snapshot:
    """All keys under a prefix at one revision of the store, in key order."""

    revision: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Put:
    """A watched key was written."""

    entry: Entry


@dataclass(frozen=True)
class Deleted:
    """A watched key was deleted, or its lease has expired."""

    key: str
    mod_revision: int


@dataclass(frozen=True)
class Reset:
    """Everything received so far from this watch is void; this is the complete prefix.

    Sent first on every watch, after a compaction passed the resume point (``"compacted"``), and
    when the store turns out to be another or an older one (``"wiped"``: the cluster id changed or
    the revision decreased): after that, earlier revisions are void too.
    """

    snapshot: Snapshot
    reason: str  # "started" | "compacted" | "wiped"


@dataclass(frozen=True)
class Disconnected:
    """The watch lost its connection and is reconnecting; nothing is void yet."""

    error: str


@dataclass(frozen=True)
class Reconnected:
    """The watch resumed where it left off; no event was missed."""


WatchEvent = Put | Deleted | Reset | Disconnected | Reconnected


class Watch(Protocol):
    """A running watch; its callback runs on the watch's own named thread."""

    def close(self) -> None:
        """Stop and join. No callback runs after this returns. Safe to call twice, and from
        the callback itself (then without the join)."""
        ...


class Lease(Protocol):
    """A lease that is renewed in the background until it is closed or has expired."""

    @property
    def id(self) -> int: ...

    @property
    def ttl_s(self) -> float:
        """As granted by the store; may be more than requested (etcd grants no less than about
        2)."""
        ...

    @property
    def lost(self) -> bool:
        """True once the store reported that the lease has expired. One failed renewal is not a
        loss: renewal continues, on every endpoint, until the store answers that it does not
        exist."""
        ...

    @property
    def renewed_s(self) -> float:
        """When the last confirmed renewal was requested (``clock.boottime()``): the lease cannot
        expire for others before that time plus its TTL."""
        ...

    def close(self, *, revoke: bool = True) -> None:
        """Stop renewing and join; with ``revoke`` delete its keys now (best effort)."""
        ...


class KeyValue(Protocol):
    """A linearizable key-value store with leases, watches and compare-and-swap."""

    def get(self, key: str) -> Entry | None:
        """The current entry of the key (linearizable), or None."""
        ...

    def list(self, prefix: str) -> Snapshot:
        """All keys under ``prefix`` at one revision."""
        ...

    def put(self, key: str, value: bytes, *, lease: Lease | None = None) -> int:
        """Write unconditionally; returns the revision of the write."""
        ...

    def compare_and_swap(
        self,
        key: str,
        value: bytes,
        *,
        expected_revision: int | None,
        lease: Lease | None = None,
        basis: Sequence[tuple[str, int]] = (),
    ) -> int | None:
        """Write only if the key's ``mod_revision`` is ``expected_revision`` (0: absent, None: any),
        and the keys of ``basis``, on which the value depends, still have these revisions.

        Returns the new revision, or None if another writer was faster. A retry after a lost
        reply must not report failure for a swap that this call has performed: the
        implementation compares the stored value with its own before it returns None.
        """
        ...

    def compare_and_delete(
        self, key: str, *, expected_revision: int | None, basis: Sequence[tuple[str, int]] = ()
    ) -> bool:
        """Delete under the conditions of :meth:`compare_and_swap`; True if this call has deleted
        it."""
        ...

    def delete_unchanged(self, keys: Sequence[str], *, revision: int) -> bool:
        """Delete all of these keys at once, unless one of them was written after ``revision``, that
        of a :meth:`list`; returns whether they are deleted. One that ends with ``/`` stands for all
        keys under it."""
        ...

    def delete(self, key: str) -> bool:
        """Delete; True if it existed."""
        ...

    def lease(self, ttl_s: float, *, on_lost: Callable[[], None] | None = None) -> Lease:
        """Grant a lease and keep it alive; ``on_lost`` runs once, on the lease's thread."""
        ...

    def watch(
        self, prefixes: Sequence[str], callback: Callable[[WatchEvent], None], *, name: str
    ) -> Watch:
        """Follow all keys under any of ``prefixes``. The first event is a ``Reset`` with the
        state now (a snapshot over all prefixes), then every change in order, each once."""
        ...

    def close(self) -> None:
        """Close every watch and lease (revoking), then the connections."""
        ...
