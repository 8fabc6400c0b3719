"""Garbage collection: commit complete attempts and remove abandoned ones.

One process runs it at the start of a world, before any process lists checkpoints. A complete
attempt whose committer died is committed. An incomplete attempt belongs to the world of its
generation and nonce. It is removed once that world has ended: when the collector is of a newer
generation, or when nothing in the attempt has changed for ``min_age_s``. Attempts of the
collector's own world and of newer generations are retained. Removing the attempt of a live writer
by mistake costs that one checkpoint only: its save fails.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from checkpoints.catalog.commit import IncompleteAttempt, commit
from checkpoints.format.names import (
    LATEST_PREFIX,
    REMOVED_PREFIX,
    CheckpointName,
    parse_attempt,
    parse_part_file,
)
from checkpoints.intervals import GARBAGE_MIN_AGE_S
from checkpoints.storage.failures import writing
from checkpoints.storage.protocol import Storage
from checkpoints.storage.roots import Root, storage_for


@dataclass(frozen=True)
class RetainedAttempt:
    """An uncommitted attempt that was not removed, and why."""

    folder: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class GarbageCollectionResult:
    """What :func:`collect_garbage` did: names committed, folders removed, attempts retained."""

    committed: tuple[str, ...]  # names
    removed: tuple[str, ...]  # folders
    retained: tuple[RetainedAttempt, ...]


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
    belongs to no world, and attempts are removed only by age. Raises :class:`SaveError` if the
    storage fails, :class:`ArgumentError` for a ``root`` that names no storage.
    """
    storage = storage_for(root)
    committed: list[str] = []
    removed: list[str] = []
    retained: list[RetainedAttempt] = []
    with writing(storage.place):
        for entry in _leftovers(storage):
            name = parse_attempt(entry)
            unfinished = "" if name is None else _finish(storage, name)
            changed_since_s = clock() - min_age_s
            why = _why_retained(storage, name, generation, nonce, changed_since_s) if name else None
            if name is not None and unfinished is None:
                committed.append(str(name))
            elif why is not None:
                retained.append(RetainedAttempt(entry, f"{unfinished}; {why}"))
            else:
                _remove(storage, entry)
                removed.append(entry)
    return GarbageCollectionResult(
        committed=tuple(committed), removed=tuple(removed), retained=tuple(retained)
    )


def _leftovers(storage: Storage) -> list[str]:
    """Attempts, folders being removed, and temporary LATEST files that were never renamed."""
    try:
        entries = sorted(storage.list(""))
    except FileNotFoundError:
        return []
    temporary = (REMOVED_PREFIX, LATEST_PREFIX)
    return [e for e in entries if parse_attempt(e) is not None or e.startswith(temporary)]


def _finish(storage: Storage, name: CheckpointName) -> str | None:
    """Commit an attempt; None on success, else the reason."""
    try:
        files = storage.list(name.attempt)
        sizes = {ranks[1] for ranks in map(parse_part_file, files) if ranks is not None}
        if len(sizes) != 1:
            return "no writer finished" if not sizes else "its parts have different world sizes"
        commit(storage, name, sizes.pop())
    except IncompleteAttempt as why:
        return str(why)
    except FileNotFoundError:
        return "it was removed in the meantime"
    return None


def _why_retained(
    storage: Storage,
    name: CheckpointName,
    generation: int,
    nonce: str | None,
    changed_since_s: float,
) -> str | None:
    """Why a writer of this attempt may still be alive, or None."""
    if nonce is not None and name.generation < generation:
        return None  # a newer generation forms only after all members have left the older one
    if name.generation > generation:
        return f"generation {name.generation} is newer than the collector's"
    if (name.generation, name.nonce) == (generation, nonce):
        return "it belongs to the collector's world"
    try:
        paths = [name.attempt, *(f"{name.attempt}/{file}" for file in storage.list(name.attempt))]
        changed = max(storage.modified_s(path) for path in paths)
    except FileNotFoundError:
        return None
    return "it changed recently" if changed > changed_since_s else None


def _remove(storage: Storage, entry: str) -> None:
    if entry.startswith(LATEST_PREFIX):
        with contextlib.suppress(FileNotFoundError):
            storage.remove(entry)
    else:
        storage.remove_folder(entry)
