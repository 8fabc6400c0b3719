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


class OtherRuns:
    """Detects that another run saves into the same folder.

    Runs have different nonces. A checkpoint of another nonce in the same generation that appears
    after this writer's first commit is of a run that is active at the same time; what is there
    before may be of the run that this one resumes.
    """

    def __init__(self) -> None:
        self._own: set[str] = set()
        self._known: set[CheckpointName] | None = None

    def than(self, nonce: str) -> OtherRuns:
        """Note the nonce of one of this run's worlds; returns this object."""
        self._own.add(nonce)
        return self

    def note(self, committed: Sequence[CheckpointName], name: CheckpointName) -> str:
        """A note if another run has committed since the last call, else ``""``."""
        others = {
            other
            for other in committed
            if other.nonce not in (*self._own, name.nonce) and other.generation == name.generation
        }
        new = others - self._known if self._known is not None else None
        self._known = others
        if not new:
            return ""
        return (
            f"{max(new, key=lambda other: other.step)} was saved by another run: runs that save "
            "into one folder remove each other's checkpoints. Give each a folder of its own"
        )


def after_commit(
    storage: Storage,
    name: CheckpointName,
    keep: RetentionFunction | None,
    others: OtherRuns | None = None,
) -> tuple[str, ...]:
    """Update LATEST, remove checkpoints that ``keep`` does not retain and superseded attempts;
    returns notes.

    The checkpoint that was just committed is retained, even if the folder has newer ones.
    """
    notes: list[str] = []
    try:
        names = committed_names(storage)
        _point_latest(storage, names[0])
        found = (_newer_run(names[0], name), others.note(names, name) if others is not None else "")
        notes += filter(None, found)
        for old in not_retained(storage, names, keep) if keep is not None else ():
            if old != name:
                remove_committed(storage, old)
        _remove_superseded(storage, name)
    except OSError as error:
        notes.append(
            f"{name} is committed, but removing older checkpoints failed: {error.strerror or error}"
        )
    return tuple(notes)


def _newer_run(newest: CheckpointName, name: CheckpointName) -> str:
    """A note if the folder's newest checkpoint is of another run of the same generation."""
    if newest.nonce == name.nonce or newest.generation != name.generation:
        return ""
    return (
        f"{newest} of another run counts as newer than {name}: latest() returns it, and only the "
        "last checkpoint of this run is kept. Resume from it, or save into another folder"
    )


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
