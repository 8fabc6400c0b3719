"""Removes the checkpoints that a retention policy does not keep, on request."""

from __future__ import annotations

import functools

from checkpoints.catalog.manifests import committed_names, read_manifest
from checkpoints.catalog.retention import remove_committed, validity_of
from checkpoints.errors import LoadError
from checkpoints.format.manifest import Manifest
from checkpoints.format.names import CheckpointName
from checkpoints.loading.load import verify
from checkpoints.policies.retention import RetentionFunction, Validity, to_remove
from checkpoints.storage.failures import reading, writing
from checkpoints.storage.patient import patient
from checkpoints.storage.roots import Root, storage_for


def prune(root: Root, keep: RetentionFunction, *, dry_run: bool = False) -> tuple[str, ...]:
    """Remove the committed checkpoints that ``keep`` does not retain; returns their names.

    Only checkpoints count of which every byte is verified. The newest of them is always retained,
    and so is a checkpoint that cannot be read now.

    Raises :class:`ReadFailed` if the folder cannot be listed, :class:`SaveError` if a checkpoint
    cannot be removed, :class:`ArgumentError` for a ``root`` that names no storage.
    """
    storage = patient(storage_for(root))
    with reading(storage.place):
        names = committed_names(storage)

    @functools.cache
    def validity(name: CheckpointName) -> Validity:
        try:
            verify(storage, str(name))
        except LoadError as error:
            return validity_of(error)
        return Validity.VALID

    @functools.cache
    def manifest_of(name: CheckpointName) -> Manifest | None:
        try:
            return read_manifest(storage, str(name))
        except LoadError:
            return None

    old = to_remove(names, keep, manifest_of, validity)
    with writing(storage.place):
        for name in () if dry_run else old:
            remove_committed(storage, name)
    return tuple(map(str, old))
