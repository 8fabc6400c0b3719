"""One writer's share of an attempt: write it, then commit if all other shares are written.

Runs in any single thread, without communication; reads live tensors only through ``data``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from checkpoints.catalog.commit import IncompleteAttempt, commit, is_committed, read_part
from checkpoints.catalog.retention import OtherRuns, PartStorage, after_commit
from checkpoints.format.checksummed_json import digest
from checkpoints.format.manifest import Lineage, Part, SharedMetadata
from checkpoints.format.names import CheckpointName, part_file, writer_file
from checkpoints.format.state_tree import Node
from checkpoints.policies.retention import RetentionFunction
from checkpoints.saving.tensor_file import Data, Pieces, write_share
from checkpoints.storage.failures import writing
from checkpoints.storage.protocol import Storage
from checkpoints.storage.small_files import write_durably
from checkpoints.tensors.partition import TensorSpec


@dataclass(frozen=True, kw_only=True)
class SaveResult:
    """The result of a synchronous save.

    ``committed``: whether the checkpoint is committed now. With several writers it is True for the
    writers that found all parts, at least for the last one unless a writer failed. In a storage of
    parts (:mod:`checkpoints.memory.node_memory`), it says that this part is stored. ``notes``
    describe problems that do not endanger the checkpoint.
    """

    name: str
    step: int
    bytes_written: int
    committed: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WriteAttempt:
    """One writer's share of one checkpoint, ready to write."""

    name: CheckpointName
    rank: int
    world_size: int
    lineage: Lineage
    data_position: Any
    specs: tuple[TensorSpec, ...]
    tree: Node
    section: tuple[int, ...] | None  # the ranks with the same tensors; None: all
    pieces: Pieces
    data: Data  # reads the bytes of a chunk
    others: OtherRuns | None = None


def write_and_commit(
    storage: Storage,
    attempt: WriteAttempt,
    *,
    keep: RetentionFunction | None,
    fence: Callable[[], bool] | None,
    clock: Callable[[], float],
    on_committed: Callable[[], object] = lambda: None,
) -> SaveResult:
    """Write the share; commit and apply ``keep`` if it was the last one.

    ``on_committed`` is called after the commit attempt, before ``keep`` is applied. Raises
    :class:`SaveError`.
    """
    name = attempt.name
    with writing(storage.place):
        if is_committed(storage, name):
            return SaveResult(name=str(name), step=name.step, bytes_written=0, committed=True)
        written = write_once(storage, attempt, clock)
    return commit_if_complete(
        storage, attempt, written, keep=keep, fence=fence, on_committed=on_committed
    )


def commit_if_complete(
    storage: Storage,
    attempt: WriteAttempt,
    written: int,
    *,
    keep: RetentionFunction | None,
    fence: Callable[[], bool] | None,
    on_committed: Callable[[], object] = lambda: None,
) -> SaveResult:
    """Commit if all shares are present and the fence allows it. Raises :class:`SaveError`."""
    name = attempt.name
    why = "fenced: this world is stale" if fence is not None and not fence() else ""
    if not why and not isinstance(storage, PartStorage):
        with writing(storage.place):
            try:
                commit(storage, name, attempt.world_size)
            except IncompleteAttempt as problem:
                why = str(problem)
    on_committed()
    if why:
        notes: tuple[str, ...] = (f"not committed: {why}",)
    elif isinstance(storage, PartStorage):
        notes = storage.part_written(name, keep)
    else:
        notes = after_commit(storage, name, keep, attempt.others)
    return SaveResult(
        name=str(name), step=name.step, bytes_written=written, committed=not why, notes=notes
    )


def write_once(storage: Storage, attempt: WriteAttempt, clock: Callable[[], float]) -> int:
    """Write this rank's file and part unless they exist; returns the number of bytes written."""
    name, rank, world_size = attempt.name, attempt.rank, attempt.world_size
    storage.make_folder("")
    storage.make_folder(name.attempt)
    with contextlib.suppress(IncompleteAttempt, FileNotFoundError):
        read_part(storage, name, rank, world_size)
        return 0  # written before by this world; a committer may be reading it
    with _removed_on_failure(storage, name, rank, world_size):
        written = write_share(
            storage,
            name.attempt,
            attempt.pieces,
            attempt.data,
            rank=rank,
            world_size=world_size,
            wall_time_s=clock(),
        )
        part = Part(
            name=name,
            world_size=world_size,
            writer=written.writer,
            specs_xxh3_128=_digest_of(attempt.specs),
            chunks=written.chunks,
            section=attempt.section,
            shared=_shared(attempt) if rank == (attempt.section or (0,))[0] else None,
        )
        data = part.to_bytes()
        final = f"{name.attempt}/{part_file(rank, world_size)}"
        write_durably(storage, f"{final}.tmp", data)
        storage.rename(f"{final}.tmp", final)
    with contextlib.suppress(FileNotFoundError):  # committed by another writer meanwhile
        storage.sync_folder(name.attempt)
    return written.writer.size_bytes + len(data)


def _digest_of(specs: tuple[TensorSpec, ...]) -> str:
    listed = json.dumps([[spec.name, spec.dtype, spec.shape] for spec in specs])
    return digest(listed.encode("ascii"))


def _shared(attempt: WriteAttempt) -> SharedMetadata:
    return SharedMetadata(
        lineage=attempt.lineage,
        data_position=attempt.data_position,
        versions=_versions(),
        specs=attempt.specs,
        tree=attempt.tree,
    )


@contextlib.contextmanager
def _removed_on_failure(
    storage: Storage, name: CheckpointName, rank: int, world_size: int
) -> Iterator[None]:
    """Free the space of a failed attempt: on a full disk, the next attempt needs it."""
    try:
        yield
    except BaseException:
        part = part_file(rank, world_size)
        for file in (part, f"{part}.tmp", writer_file(rank, world_size)):
            with contextlib.suppress(OSError):  # report the first failure
                storage.remove(f"{name.attempt}/{file}")
        if world_size == 1:
            with contextlib.suppress(OSError):
                storage.remove_folder(name.attempt)
        raise


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
