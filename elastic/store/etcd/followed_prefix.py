"""A watch's state of one prefix, and its validation against the store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic.store.etcd.keys import entry_of, key_of
from elastic.store.keyvalue import Deleted, Entry, Put


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
