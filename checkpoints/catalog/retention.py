"""Updates LATEST and removes old checkpoints after a commit.

Nothing here fails a save: the checkpoint is committed already. A checkpoint is renamed before its
removal, so that a partly removed one is never listed.
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
    """A storage that holds parts but commits nothing; readers merge the parts of several
    storages."""

    def part_written(self, name: CheckpointName, keep: RetentionFunction | None) -> tuple[str, ...]:
        """Called after a part is added: remove parts that ``keep`` does not retain; returns
        notes."""
        ...


def after_commit(
    storage: Storage, name: CheckpointName, keep: RetentionFunction | None
) -> tuple[str, ...]:
    """Update LATEST, remove checkpoints that ``keep`` does not retain and superseded attempts;
    returns notes."""
    notes = []
    try:
        names = committed_names(storage)
        _point_latest(storage, names[0])
        for old in not_retained(storage, names, keep) if keep is not None else ():
            remove_committed(storage, old)
        _remove_superseded(storage, name)
    except OSError as error:
        notes.append(
            f"{name} is committed, but removing older checkpoints failed: {error.strerror or error}"
        )
    return tuple(notes)


def not_retained(
    storage: Storage, newest_first: Sequence[CheckpointName], keep: RetentionFunction
) -> tuple[CheckpointName, ...]:
    """The committed checkpoints that ``keep`` does not retain, oldest first."""

    @functools.cache
    def manifest_of(name: CheckpointName) -> Manifest | None:
        try:
            return read_manifest(storage, str(name))
        except LoadError:
            return None

    return to_remove(newest_first, keep, manifest_of)


def prune(root: Root, keep: RetentionFunction, *, dry_run: bool = False) -> tuple[str, ...]:
    """Remove the committed checkpoints that ``keep`` does not retain; returns their names.

    The newest is always retained.

    Raises :class:`SaveError` if the storage fails, :class:`ArgumentError` for a ``root`` that names
    no storage.
    """
    storage = storage_for(root)
    with writing(storage.place):
        old = not_retained(storage, committed_names(storage), keep)
        for name in () if dry_run else old:
            remove_committed(storage, name)
    return tuple(map(str, old))


def remove_committed(storage: Storage, name: CheckpointName) -> None:
    """Remove a committed checkpoint. Safe against concurrent removal."""
    try:
        storage.rename(str(name), name.removed)
    except FileNotFoundError:
        return
    storage.remove_folder(name.removed)


def _point_latest(storage: Storage, newest: CheckpointName) -> None:
    """Write LATEST, for users and scripts; this package never reads it."""
    temporary = f"{LATEST_PREFIX}{secrets.token_hex(4)}"
    write_durably(storage, temporary, f"{newest}\n".encode("ascii"))
    storage.rename(temporary, LATEST)


def _remove_superseded(storage: Storage, name: CheckpointName) -> None:
    """Remove attempts of the same world at earlier steps: none can be completed any more."""
    for folder in storage.list(""):
        attempt = parse_attempt(folder)
        if (
            attempt is not None
            and (attempt.generation, attempt.nonce) == (name.generation, name.nonce)
            and attempt.step < name.step
        ):
            storage.remove_folder(folder)
