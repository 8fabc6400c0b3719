"""What happens to other folders once a checkpoint is committed.

Nothing here may fail a save: the checkpoint stands. Removing a committed checkpoint renames it
first, so that one that is half removed is never listed.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from checkpoints.catalog.manifests import committed_names, read_manifest
from checkpoints.errors import LoadError
from checkpoints.format.manifest import Manifest
from checkpoints.format.names import (
    LATEST,
    LATEST_PREFIX,
    CheckpointName,
    parse_attempt,
)
from checkpoints.policies.retention import RetentionFunction, to_remove
from checkpoints.storage.failures import writing
from checkpoints.storage.protocol import Storage
from checkpoints.storage.roots import Root, storage_for
from checkpoints.storage.small_files import write_durably


@runtime_checkable
class PartStorage(Protocol):
    """A storage in which nothing is committed: whoever looks merges parts from several places."""

    def part_written(self, name: CheckpointName, keep: RetentionFunction | None) -> tuple[str, ...]:
        """One more part is there: remove what ``keep`` gives up; notes."""
        ...


def after_commit(
    storage: Storage, name: CheckpointName, keep: RetentionFunction | None
) -> tuple[str, ...]:
    """Point LATEST, remove what ``keep`` gives up and what can never be completed; notes."""
    notes = []
    try:
        names = committed_names(storage)
        _point_latest(storage, names[0])
        for old in not_retained(storage, names, keep) if keep is not None else ():
            remove_committed(storage, old)
        _remove_superseded(storage, name)
    except OSError as error:
        notes.append(f"{name} is committed, but tidying up failed: {error.strerror or error}")
    return tuple(notes)


def not_retained(
    storage: Storage, newest_first: Sequence[CheckpointName], keep: RetentionFunction
) -> tuple[CheckpointName, ...]:
    """What ``keep`` gives up of the committed checkpoints, oldest first."""

    @functools.cache
    def manifest_of(name: CheckpointName) -> Manifest | None:
        try:
            return read_manifest(storage, str(name))
        except LoadError:
            return None

    return to_remove(newest_first, keep, manifest_of)


def prune(root: Root, keep: RetentionFunction, *, dry_run: bool = False) -> tuple[str, ...]:
    """Remove the committed checkpoints that ``keep`` gives up, never the newest; their names.

    Raises :class:`SaveError` if the storage fails.
    """
    storage = storage_for(root)
    with writing(storage.place):
        old = not_retained(storage, committed_names(storage), keep)
        for name in () if dry_run else old:
            remove_committed(storage, name)
    return tuple(map(str, old))


def remove_committed(storage: Storage, name: CheckpointName) -> None:
    """Remove a committed checkpoint; others that do it at the same time are no trouble."""
    try:
        storage.rename(str(name), name.removed)
    except FileNotFoundError:
        return
    storage.remove_folder(name.removed)


def _point_latest(storage: Storage, newest: CheckpointName) -> None:
    """For people and scripts; this package never reads it."""
    temporary = f"{LATEST_PREFIX}{secrets.token_hex(4)}"
    write_durably(storage, temporary, f"{newest}\n".encode("ascii"))
    storage.rename(temporary, LATEST)


def _remove_superseded(storage: Storage, name: CheckpointName) -> None:
    """Attempts of the same world at earlier steps: all its writers have gone on without them."""
    for folder in storage.list(""):
        attempt = parse_attempt(folder)
        if (
            attempt is not None
            and (attempt.generation, attempt.nonce) == (name.generation, name.nonce)
            and attempt.step < name.step
        ):
            storage.remove_folder(folder)
