"""Garbage collection: commit complete attempts and remove abandoned ones.

One process runs it at the start of a world, before any process lists checkpoints. A complete
attempt whose committer died is committed. An incomplete attempt belongs to the world of its
generation and nonce. It is removed once that world has ended: when the collector is of a newer
generation, or when nothing in the attempt has changed for ``min_age_s``. Attempts of the
collector's own world are retained. Removing the attempt of a live writer by mistake costs that one
checkpoint only: its save fails.

Incomplete attempts are removed first: on a full disk, a commit needs their space. Whatever fails
here is reported and left for the next collection, so that it never prevents a restart.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from checkpoints.commit import (
    IncompleteAttempt,
    check_no_writer_failed,
    commit,
    remove_private_manifests,
    world_size_of,
)
from checkpoints.errors import UnsupportedFormat
from checkpoints.intervals import GARBAGE_MIN_AGE_S
from checkpoints.names import (
    LATEST_PREFIX,
    REMOVED_PREFIX,
    CheckpointName,
    parse_attempt,
)
from checkpoints.objects import Root, storage_for
from checkpoints.storage import ABSENT, Storage, patient, reading, reason_of, repeated


@dataclass(frozen=True)
class RetainedAttempt:
    """An uncommitted attempt that was not removed, and why."""

    folder: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class GarbageCollectionResult:
    """What :func:`collect_garbage` did: names committed, folders removed, attempts retained, and
    those of the retained ones whose commit or removal failed."""

    committed: tuple[str, ...]  # names
    removed: tuple[str, ...]  # folders
    retained: tuple[RetainedAttempt, ...]
    failed: tuple[RetainedAttempt, ...] = ()


def collect_garbage(
    root: Root,
    *,
    generation: int = 0,
    nonce: str | None = None,
    min_age_s: float = GARBAGE_MIN_AGE_S,
    clock: Callable[[], float] = time.time,
) -> GarbageCollectionResult:
    """Commit complete attempts and remove those whose world has ended. One process calls it.

    ``generation`` and ``nonce`` are those of the caller's world; with a nonce of None the caller
    belongs to no world, and attempts are removed only by age. Raises :class:`ReadFailed` if the
    folder cannot be listed, :class:`ArgumentError` for a ``root`` that names no storage.
    """
    collection = _Collection(
        patient(storage_for(root)), _Collector(generation, nonce, clock() - min_age_s)
    )
    with reading(collection.storage.place):
        leftovers = _leftovers(collection.storage)
    for entry in leftovers:
        name = parse_attempt(entry)
        if name is None:
            collection.remove(entry)
    attempts = [name for name in map(parse_attempt, leftovers) if name is not None]
    complete = [name for name in attempts if collection.remove_if_incomplete(name)]
    for name in complete:
        collection.commit(name)
    return GarbageCollectionResult(
        committed=tuple(collection.committed),
        removed=tuple(collection.removed),
        retained=tuple(collection.retained),
        failed=tuple(collection.failed),
    )


@dataclass(frozen=True)
class _Collector:
    """The world of the collector, and since when an attempt must have been unchanged."""

    generation: int
    nonce: str | None
    changed_since_s: float

    def is_of(self, name: CheckpointName) -> bool:
        """Whether the attempt is of the collector's world."""
        return (self.generation, self.nonce) == (name.generation, name.nonce)


class _Collection:
    """One collection, and what it did so far."""

    def __init__(self, storage: Storage, collector: _Collector) -> None:
        self.storage = storage
        self._collector = collector
        self.committed: list[str] = []
        self.removed: list[str] = []
        self.retained: list[RetainedAttempt] = []
        self.failed: list[RetainedAttempt] = []

    def remove_if_incomplete(self, name: CheckpointName) -> bool:
        """Whether the attempt seems complete. One that is not is removed, or retained."""
        try:
            files = self.storage.list(name.attempt)
            check_no_writer_failed(files)
            world_size_of(files)
        except ABSENT:
            return False
        except IncompleteAttempt as why:
            self._remove_or_retain(name, str(why))
            return False
        except OSError as error:
            self._fail(name.attempt, f"it cannot be listed: {reason_of(error)}")
            return False
        return True

    def commit(self, name: CheckpointName) -> None:
        if not self._collector.is_of(name):
            remove_private_manifests(self.storage, name)
        try:
            world_size = world_size_of(self.storage.list(name.attempt))
            repeated(self.storage, lambda: commit(self.storage, name, world_size))
            self.committed.append(str(name))
        except IncompleteAttempt as why:
            if isinstance(why.__cause__, UnsupportedFormat):
                self._fail(name.attempt, f"it cannot be committed: {why}")
            else:
                self._remove_or_retain(name, str(why))
        except ABSENT:
            self._remove_or_retain(name, "a file is missing")
        except OSError as error:
            self._fail(name.attempt, f"it cannot be committed: {reason_of(error)}")

    def remove(self, entry: str) -> None:
        try:
            if entry.startswith(LATEST_PREFIX):
                with contextlib.suppress(FileNotFoundError):
                    self.storage.remove(entry)
            else:
                self.storage.remove_folder(entry)
            self.removed.append(entry)
        except OSError as error:
            self._fail(entry, f"it cannot be removed: {reason_of(error)}")

    def _remove_or_retain(self, name: CheckpointName, unfinished: str) -> None:
        try:
            why = _why_retained(self.storage, name, self._collector)
        except OSError as error:
            why = f"its age cannot be read: {reason_of(error)}"
        if why is None:
            self.remove(name.attempt)
        else:
            self.retained.append(RetainedAttempt(name.attempt, f"{unfinished}; {why}"))

    def _fail(self, entry: str, reason: str) -> None:
        self.failed.append(RetainedAttempt(entry, reason))
        self.retained.append(self.failed[-1])


def _leftovers(storage: Storage) -> list[str]:
    """Attempts, folders being removed, and temporary LATEST files that were never renamed."""
    try:
        entries = sorted(storage.list(""))
    except FileNotFoundError:
        return []
    temporary = (REMOVED_PREFIX, LATEST_PREFIX)
    return [e for e in entries if parse_attempt(e) is not None or e.startswith(temporary)]


def _why_retained(storage: Storage, name: CheckpointName, collector: _Collector) -> str | None:
    """Why a writer of this attempt may still be alive, or None."""
    if collector.nonce is not None and name.generation < collector.generation:
        return None  # a newer generation forms only after all members have left the older one
    if collector.is_of(name):
        return "it belongs to the collector's world"
    try:
        paths = [name.attempt, *(f"{name.attempt}/{file}" for file in storage.list(name.attempt))]
        changed = max(storage.modified_s(path) for path in paths)
    except ABSENT:
        return None
    return "it changed recently" if changed > collector.changed_since_s else None
