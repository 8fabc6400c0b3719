"""Which checkpoint to go on from: the newest of this history that is whole."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from checkpoints.catalog.manifests import committed_names, read_manifest
from checkpoints.errors import LoadError
from checkpoints.format.lineage import abandoned, as_lineage
from checkpoints.format.manifest import Ancestor, CheckpointInfo, Lineage, info_of
from checkpoints.format.names import CheckpointName
from checkpoints.loading.load import verify
from checkpoints.storage.failures import reading
from checkpoints.storage.protocol import Storage
from checkpoints.storage.roots import Root, storage_for


@dataclass(frozen=True)
class PassedOver:
    """A committed checkpoint that was not taken, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Resolution:
    """What :func:`latest` found: the checkpoint, if there is one, and what it passed over."""

    checkpoint: CheckpointInfo | None
    passed_over: tuple[PassedOver, ...]


def list_checkpoints(root: Root) -> tuple[CheckpointInfo, ...]:
    """Committed checkpoints, newest first by (generation, step).

    Only those whose manifest can be read and whose files are there with the right sizes; their
    content is checked by :func:`verify`, :func:`latest` and :func:`load`.
    """
    storage = storage_for(root)
    found = []
    for name in _names(storage):
        try:
            found.append(info_of(read_manifest(storage, str(name))))
        except LoadError:  # latest() reports it with its reason
            continue
    return tuple(found)


def latest(
    root: Root, *, lineage: Iterable[Ancestor | tuple[int, int]] | None = None
) -> Resolution:
    """The newest checkpoint by (generation, step) that is whole, every byte of it verified.

    With ``lineage`` (:mod:`checkpoints.format.lineage`), those that it abandoned are never taken.
    Without one, the lineage of the newest checkpoint whose manifest can be read is followed; what
    it abandoned is taken only if nothing else is whole, since that loses less than a new start.

    Raises :class:`ReadFailed` if the folder cannot be listed; one that is missing has no
    checkpoints.
    """
    storage = storage_for(root)
    names = _names(storage)
    follow = _newest_lineage(storage, names) if lineage is None else as_lineage(lineage)
    astray = {name: why for name in names if (why := abandoned(name, follow)) is not None}
    candidates = [name for name in names if name not in astray]
    if lineage is None:
        candidates += astray
    chosen, failures = _first_whole(storage, candidates)
    passed = (
        PassedOver(str(name), failures.get(name) or astray[name])
        for name in names
        if name in failures or (name in astray and (chosen is None or _newer(name, chosen)))
    )
    return Resolution(chosen, tuple(passed))


def _first_whole(
    storage: Storage, candidates: Iterable[CheckpointName]
) -> tuple[CheckpointInfo | None, dict[CheckpointName, str]]:
    """The first that verifies, and why those before it do not."""
    failures: dict[CheckpointName, str] = {}
    for name in candidates:
        try:
            return verify(storage, str(name)), failures
        except LoadError as error:
            failures[name] = error.message
    return None, failures


def _newer(name: CheckpointName, chosen: CheckpointInfo) -> bool:
    return (name.generation, name.step) > (chosen.generation, chosen.step)


def _newest_lineage(storage: Storage, names: list[CheckpointName]) -> Lineage:
    for name in names:
        try:
            return read_manifest(storage, str(name)).lineage
        except LoadError:
            continue
    return ()


def _names(storage: Storage) -> list[CheckpointName]:
    with reading(storage.place):
        return committed_names(storage)
