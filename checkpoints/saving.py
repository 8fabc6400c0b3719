"""Saving: this rank's share, and the commit if it finds everybody else's. No collectives."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from checkpoints.commit import Incomplete, commit, is_committed, put, read_part
from checkpoints.errors import ArgumentError, StateError
from checkpoints.keep import Keep, LatestN
from checkpoints.lineage import as_lineage
from checkpoints.manifest import Ancestor, Lineage, Part, Shared
from checkpoints.naming import MAX_WORLD_SIZE, CheckpointName, part_file, writer_file
from checkpoints.plan import share
from checkpoints.retention import after_commit
from checkpoints.sealed import digest
from checkpoints.storage import Root, Storage, storage_for, writing
from checkpoints.tree import pack, spec_of
from checkpoints.writer import write_share

Clock = Callable[[], float]
"""Seconds since 1970: for records and people, never for decisions."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a save did.

    ``committed`` says whether the checkpoint stands now. With several writers it is True for
    those that found all parts, so for at least the last one, unless some writer failed.
    ``notes`` are sentences about what did not go as wished but does not endanger the checkpoint.
    """

    name: str
    step: int
    bytes_written: int
    committed: bool
    notes: tuple[str, ...] = ()


def save(
    root: Root,
    state: object,
    *,
    step: int,
    nonce: str,
    generation: int = 0,
    rank: int = 0,
    world_size: int = 1,
    lineage: Iterable[Ancestor | tuple[int, int]] = (),
    data_position: Any = None,
    keep: Keep | None = LatestN(3),  # noqa: B008  frozen
    fence: Callable[[], bool] | None = None,
    clock: Clock = time.time,
) -> Saved:
    """Write this rank's share of ``state``, and commit if all ``world_size`` shares are there.

    Every rank of a world calls it with the same tensors, step, generation and nonce; none waits
    for another. ``state`` is a tree of dicts, lists and tuples of JSON values and tensors; values
    that are not tensors are kept as rank 0 has them. ``nonce`` is the same for all writers of a
    world and for no other (:func:`checkpoints.new_nonce`). ``data_position`` is JSON for the
    caller. ``keep`` runs after the commit. ``fence`` is asked before it: False means that this
    world is stale, and the attempt stays uncommitted.

    Saving a committed step again writes nothing and says ``committed``.

    Raises :class:`ArgumentError` and :class:`StateError` before anything is written, and
    :class:`SaveError` if the storage fails; older checkpoints are as they were in every case.
    """
    _check_world(rank, world_size)
    name = CheckpointName(step, generation, nonce)
    _check_json(data_position)
    storage = storage_for(root)
    ancestors = _lineage_of(name, lineage)
    with writing(storage.place):
        if is_committed(storage, name):
            return Saved(name=str(name), step=step, bytes_written=0, committed=True)
        written = _write_once(
            storage, name, state, rank, world_size, ancestors, data_position, clock
        )
        if fence is not None and not fence():
            notes: tuple[str, ...] = ("not committed: the fence says that this world is stale",)
            return Saved(
                name=str(name), step=step, bytes_written=written, committed=False, notes=notes
            )
        try:
            commit(storage, name, world_size)
        except Incomplete as why:
            notes = (f"not committed: {why}",)
            return Saved(
                name=str(name), step=step, bytes_written=written, committed=False, notes=notes
            )
    notes = after_commit(storage, name, keep)
    return Saved(name=str(name), step=step, bytes_written=written, committed=True, notes=notes)


def _write_once(
    storage: Storage,
    name: CheckpointName,
    state: object,
    rank: int,
    world_size: int,
    lineage: Lineage,
    data_position: Any,
    clock: Clock,
) -> int:
    """Write this rank's file and part, unless they are there; the number of bytes written."""
    tree, tensors = pack(state)
    specs = tuple(spec_of(key, tensor) for key, tensor in tensors.items())
    storage.make_folder("")
    storage.make_folder(name.attempt)
    with contextlib.suppress(Incomplete, FileNotFoundError):
        read_part(storage, name, rank, world_size)
        return 0  # this world wrote it before; a committer may be reading it
    listed = json.dumps([[spec.name, spec.dtype, spec.shape] for spec in specs])
    with _removed_on_failure(storage, name, rank, world_size):
        written = write_share(
            storage,
            name.attempt,
            share(specs, world_size, rank),
            tensors,
            rank=rank,
            world_size=world_size,
            wall_time_s=clock(),
        )
        part = Part(
            name=name,
            world_size=world_size,
            writer=written.writer,
            specs_xxh3_128=digest(listed.encode("ascii")),
            chunks=written.chunks,
            shared=None
            if rank
            else Shared(
                lineage=lineage,
                data_position=data_position,
                versions=_versions(),
                specs=specs,
                tree=tree,
            ),
        )
        data = part.to_bytes()
        final = f"{name.attempt}/{part_file(rank, world_size)}"
        put(storage, f"{final}.tmp", data)
        storage.rename(f"{final}.tmp", final)
    with contextlib.suppress(FileNotFoundError):  # somebody commits it this very moment
        storage.sync_folder(name.attempt)
    return written.writer.size_bytes + len(data)


@contextlib.contextmanager
def _removed_on_failure(
    storage: Storage, name: CheckpointName, rank: int, world_size: int
) -> Iterator[None]:
    """Give the space back: on a full disk, a dead attempt is what the next one lacks room for."""
    try:
        yield
    except BaseException:
        part = part_file(rank, world_size)
        for file in (part, f"{part}.tmp", writer_file(rank, world_size)):
            with contextlib.suppress(OSError):  # the first failure is the one to report
                storage.remove(f"{name.attempt}/{file}")
        if world_size == 1:
            with contextlib.suppress(OSError):
                storage.remove_folder(name.attempt)
        raise


def _check_world(rank: int, world_size: int) -> None:
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise ArgumentError(f"world_size {world_size} is not between 1 and {MAX_WORLD_SIZE}")
    if not 0 <= rank < world_size:
        raise ArgumentError(f"rank {rank} is not between 0 and {world_size - 1}")


def _check_json(data_position: Any) -> None:
    try:
        json.dumps(data_position, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise StateError(f"data_position is not strict JSON: {error}") from error


def _lineage_of(name: CheckpointName, pairs: Iterable[Ancestor | tuple[int, int]]) -> Lineage:
    lineage = as_lineage(pairs)
    if lineage and lineage[-1].generation != name.generation:
        raise ArgumentError(
            f"the lineage ends with generation {lineage[-1].generation}, "
            f"the checkpoint is of generation {name.generation}",
            hint="checkpoints.descend(origin, generation) makes the lineage of a generation.",
        )
    if lineage and lineage[-1].began_at_step > name.step:
        raise ArgumentError(
            f"generation {name.generation} began at step {lineage[-1].began_at_step}, "
            f"after step {name.step}"
        )
    return lineage


@functools.cache
def _versions() -> dict[str, str]:
    try:
        own = importlib.metadata.version("torch-elastic-harness")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        own = "unknown"
    return {
        "checkpoints": own,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
