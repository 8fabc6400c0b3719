"""What one process does at the start of a world, before anyone lists: finish or remove leftovers.

A dead committer's finished attempt is committed. An attempt that is not finished belongs to the
world of its generation and nonce. It is removed once that world is over, which is so when a newer
generation sweeps, or when nothing in it has changed for ``min_age_s``. Attempts of the sweeper's
own world and of newer generations are left alone. Removing a living writer's attempt by mistake
costs that one checkpoint and nothing else: its save fails.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from checkpoints.catalog.commit import Incomplete, commit
from checkpoints.format.names import (
    LATEST_PREFIX,
    REMOVED_PREFIX,
    CheckpointName,
    parse_attempt,
    parse_part_file,
)
from checkpoints.storage.failures import writing
from checkpoints.storage.protocol import Storage
from checkpoints.storage.roots import Root, storage_for


@dataclass(frozen=True)
class LeftAlone:
    """A leftover that stays, and why."""

    folder: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Swept:
    """What a sweep did."""

    committed: tuple[str, ...]  # names
    removed: tuple[str, ...]  # folders
    left_alone: tuple[LeftAlone, ...]


def sweep(
    root: Root,
    *,
    generation: int = 0,
    nonce: str | None = None,
    min_age_s: float = 3600.0,
    clock: Callable[[], float] = time.time,
) -> Swept:
    """Commit finished attempts and remove those whose world is over. One process calls it.

    ``generation`` and ``nonce`` are those of the caller's world; a nonce of None says that the
    caller has no world and removes by age alone. Raises :class:`SaveError` if the storage fails.
    """
    storage = storage_for(root)
    committed: list[str] = []
    removed: list[str] = []
    left: list[LeftAlone] = []
    with writing(storage.place):
        for entry in _leftovers(storage):
            name = parse_attempt(entry)
            unfinished = "" if name is None else _finish(storage, name)
            owner = _owner(storage, name, generation, nonce, clock() - min_age_s) if name else None
            if name is not None and unfinished is None:
                committed.append(str(name))
            elif owner is not None:
                left.append(LeftAlone(entry, f"{unfinished}; {owner}"))
            else:
                _remove(storage, entry)
                removed.append(entry)
    return Swept(committed=tuple(committed), removed=tuple(removed), left_alone=tuple(left))


def _leftovers(storage: Storage) -> list[str]:
    """Attempts, folders on their way out, and LATEST files that were never renamed."""
    try:
        entries = sorted(storage.list(""))
    except FileNotFoundError:
        return []
    debris = (REMOVED_PREFIX, LATEST_PREFIX)
    return [e for e in entries if parse_attempt(e) is not None or e.startswith(debris)]


def _finish(storage: Storage, name: CheckpointName) -> str | None:
    """Commit an attempt; None if that worked, else why not."""
    try:
        files = storage.list(name.attempt)
        sizes = {ranks[1] for ranks in map(parse_part_file, files) if ranks is not None}
        if len(sizes) != 1:
            return "no writer finished" if not sizes else "its parts are of worlds of several sizes"
        commit(storage, name, sizes.pop())
    except Incomplete as why:
        return str(why)
    except FileNotFoundError:
        return "it vanished"
    return None


def _owner(
    storage: Storage,
    name: CheckpointName,
    generation: int,
    nonce: str | None,
    changed_since_s: float,
) -> str | None:
    """Why somebody may still be writing an attempt, or None."""
    if nonce is not None and name.generation < generation:
        return None  # a newer generation forms only after the members of the older have left it
    if name.generation > generation:
        return f"generation {name.generation} is newer than this one"
    if (name.generation, name.nonce) == (generation, nonce):
        return "it is of this world"
    try:
        paths = [name.attempt, *(f"{name.attempt}/{file}" for file in storage.list(name.attempt))]
        changed = max(storage.modified_s(path) for path in paths)
    except FileNotFoundError:
        return None
    return "it changed lately" if changed > changed_since_s else None


def _remove(storage: Storage, entry: str) -> None:
    if entry.startswith(LATEST_PREFIX):
        with contextlib.suppress(FileNotFoundError):
            storage.remove(entry)
    else:
        storage.remove_folder(entry)
