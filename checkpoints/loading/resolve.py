"""Find the checkpoint to resume from: the newest valid one of this training history."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from checkpoints.catalog.manifests import committed_names, read_manifest
from checkpoints.errors import LoadError
from checkpoints.format.lineage import as_lineage, why_abandoned
from checkpoints.format.manifest import Ancestor, CheckpointInfo, Lineage, info_of
from checkpoints.format.names import CheckpointName
from checkpoints.loading.load import verify
from checkpoints.loading.tiered_storage import readable
from checkpoints.storage.failures import reading
from checkpoints.storage.protocol import Storage
from checkpoints.storage.roots import Root


@dataclass(frozen=True)
class SkippedCheckpoint:
    """A committed checkpoint that :func:`latest` did not choose, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Resolution:
    """The result of :func:`latest`: the chosen checkpoint, if any, and the newer ones it
    skipped."""

    checkpoint: CheckpointInfo | None
    skipped: tuple[SkippedCheckpoint, ...]


def list_checkpoints(root: Root) -> tuple[CheckpointInfo, ...]:
    """The committed checkpoints, newest first by (generation, step).

    Lists those whose manifest can be read and whose files exist with the right sizes; their
    content is verified by :func:`verify`, :func:`latest` and :func:`load`. Raises
    :class:`ReadFailed` if the folder cannot be listed, :class:`ArgumentError` for a ``root`` that
    names no storage.
    """
    storage = readable(root)
    found = []
    for name in _names(storage):
        try:
            found.append(info_of(read_manifest(storage, str(name))))
        except LoadError:  # latest() reports the reason
            continue
    return tuple(found)


def latest(
    root: Root,
    *,
    lineage: Iterable[Ancestor | tuple[int, int]] | None = None,
    unusable: Mapping[str, str] | None = None,
) -> Resolution:
    """The newest valid checkpoint by (generation, step), with every byte verified.

    With ``lineage`` (:mod:`checkpoints.format.lineage`), checkpoints that it abandoned are never
    chosen. Without one, the lineage of the newest checkpoint with a readable manifest applies; a
    checkpoint that it abandoned is chosen only if no other is valid, which loses less than a start
    from scratch.

    With ``unusable``, the names that a load has refused and why, only manifests and sizes are
    verified: :func:`load` verifies every byte that it reads. So a large checkpoint is not read
    twice, and not by one process alone. Call it with ``{}``, load, and if that raises a
    :class:`LoadError`, call it again with the name added.

    Raises :class:`ReadFailed` if the folder cannot be listed; a missing folder has no checkpoints.
    Raises :class:`ArgumentError` for a ``root`` that names no storage, or an invalid ``lineage``.
    """
    refused = unusable or {}
    storage = readable(root)
    names = _names(storage)
    follow = _newest_lineage(storage, names) if lineage is None else as_lineage(lineage)
    off_lineage = {name: why for name in names if (why := why_abandoned(name, follow)) is not None}
    candidates = [name for name in names if name not in off_lineage]
    if lineage is None:
        candidates += off_lineage
    check = _verify_every_byte if unusable is None else _verify_sizes
    chosen, failures = _first_valid(storage, candidates, refused, check)
    skipped = (
        SkippedCheckpoint(str(name), failures.get(name) or off_lineage[name])
        for name in names
        if name in failures or (name in off_lineage and (chosen is None or _newer(name, chosen)))
    )
    return Resolution(chosen, tuple(skipped))


def _verify_every_byte(storage: Storage, name: str) -> CheckpointInfo:
    return verify(storage, name)


def _verify_sizes(storage: Storage, name: str) -> CheckpointInfo:
    return info_of(read_manifest(storage, name))


def _first_valid(
    storage: Storage,
    candidates: Iterable[CheckpointName],
    refused: Mapping[str, str],
    check: Callable[[Storage, str], CheckpointInfo],
) -> tuple[CheckpointInfo | None, dict[CheckpointName, str]]:
    """The first candidate that passes, and why the ones before it do not."""
    failures: dict[CheckpointName, str] = {}
    for name in candidates:
        if (reason := refused.get(str(name))) is not None:
            failures[name] = reason
            continue
        try:
            return check(storage, str(name)), failures
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
