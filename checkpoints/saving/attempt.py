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

from checkpoints.catalog.commit import (
    IncompleteAttempt,
    MissingParts,
    WriterFailed,
    check_no_writer_failed,
    commit,
    is_committed,
    read_part,
)
from checkpoints.catalog.manifests import check_document_size, read_manifest
from checkpoints.catalog.retention import FolderHistory, PartStorage, after_commit, free_space
from checkpoints.errors import LoadError, NameTaken, StateError, WriteFailed
from checkpoints.format.checksummed_json import digest
from checkpoints.format.manifest import Lineage, Manifest, Part, SharedMetadata
from checkpoints.format.names import (
    CheckpointName,
    failure_file,
    part_file,
    writer_file,
)
from checkpoints.format.state_tree import Node
from checkpoints.policies.retention import RetentionFunction
from checkpoints.saving.tensor_file import Data, Pieces, WrittenFile, write_share
from checkpoints.storage.failures import ABSENT, is_full, writing
from checkpoints.storage.patient import repeated
from checkpoints.storage.protocol import Storage
from checkpoints.storage.small_files import sync_folder, write_durably
from checkpoints.tensors.partition import TensorSpec, chunks_of
from checkpoints.tensors.regions import Extent


@dataclass(frozen=True, kw_only=True)
class SaveResult:
    """The result of a synchronous save.

    ``committed``: whether the checkpoint is committed now. With several writers it is True for the
    writers that found all parts, at least for the last one unless a writer failed. In a storage of
    parts (:mod:`checkpoints.memory.node_memory`), it says that this part is stored.
    ``is_waiting``: other writers may still complete it. ``notes`` describe problems that do not
    endanger the checkpoint.
    """

    name: str
    step: int
    bytes_written: int
    committed: bool
    is_waiting: bool = False
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
    history: FolderHistory | None = None

    @property
    def size_bytes(self) -> int:
        """The size of the tensors."""
        return sum(place.count * spec.element_bytes for spec, place in self.pieces)


def write_unless_committed(
    storage: Storage, attempt: WriteAttempt, clock: Callable[[], float]
) -> int | None:
    """Write the share; returns the number of bytes, None if the checkpoint is already committed.
    Raises :class:`SaveError`."""
    with writing(storage.place):
        if is_committed(storage, attempt.name):
            _check_same(attempt, _manifest_of(storage, attempt.name))
            return None
        return write_once(storage, attempt, clock)


def commit_if_complete(
    storage: Storage,
    attempt: WriteAttempt,
    written: int,
    *,
    keep: RetentionFunction | None,
    fence: Callable[[], bool] | None,
    on_committed: Callable[[], object] = lambda: None,
) -> SaveResult:
    """Commit if all shares are present and the fence allows it, then apply ``keep``.

    ``on_committed`` is called after the commit attempt, before ``keep`` is applied. Raises
    :class:`SaveError`.
    """
    name = attempt.name
    why = "fenced: this world is stale" if fence is not None and not fence() else ""
    is_waiting = False
    if not why and not isinstance(storage, PartStorage):
        with writing(storage.place):
            try:
                _commit(storage, attempt)
            except WriterFailed as failure:
                remove_share(storage, name, attempt.rank, attempt.world_size)
                raise _of_other_writer(name, failure) from failure
            except IncompleteAttempt as problem:
                why, is_waiting = str(problem), isinstance(problem, MissingParts)
                if attempt.world_size == 1:
                    give_up(storage, name, attempt.rank, attempt.world_size)
                    raise WriteFailed(
                        f"{name} cannot be committed: {problem}",
                        hint="Older checkpoints are unchanged.",
                    ) from problem
    on_committed()
    if why:
        notes: tuple[str, ...] = (f"not committed: {why}",)
    elif isinstance(storage, PartStorage):
        notes = storage.part_written(name, keep)
    else:
        notes = after_commit(storage, name, keep, attempt.history)
    return SaveResult(
        name=str(name),
        step=name.step,
        bytes_written=written,
        committed=not why,
        is_waiting=is_waiting,
        notes=notes,
    )


def _commit(storage: Storage, attempt: WriteAttempt) -> None:
    """Commit. If that fails, earlier attempts are removed: only one is kept for a later try."""

    def commit_patiently() -> Manifest | None:
        return repeated(storage, lambda: commit(storage, attempt.name, attempt.world_size))

    try:
        manifest = commit_patiently()
    except OSError as error:
        is_freed = free_space(storage, attempt.name)
        if not is_full(error) or not is_freed:
            raise
        manifest = commit_patiently()
    if manifest is not None and attempt.history is not None:
        attempt.history.remember(manifest)


def write_once(storage: Storage, attempt: WriteAttempt, clock: Callable[[], float]) -> int:
    """Write this rank's file and part unless they exist; returns the number of bytes written."""
    name, rank, world_size = attempt.name, attempt.rank, attempt.world_size
    repeated(storage, lambda: storage.make_folder(""))
    repeated(storage, lambda: storage.make_folder(name.attempt))
    part = _written_before(storage, attempt)
    if part is not None:
        _check_same(attempt, part)
        return 0  # a committer may be reading it
    with _freed_on_failure(storage, name, rank, world_size):
        _check_others(storage, name, rank, world_size)
        if isinstance(storage, PartStorage):
            storage.make_room(name, attempt.size_bytes)
        written = _write_share(storage, attempt, clock())
        data = _part_of(attempt, written).to_bytes()
        _check_part_size(attempt, len(data))
        repeated(storage, lambda: _put_part(storage, attempt, data))
    with contextlib.suppress(FileNotFoundError):  # committed by another writer meanwhile
        repeated(storage, lambda: sync_folder(storage, name.attempt))
    return written.writer.size_bytes + len(data)


def _part_of(attempt: WriteAttempt, written: WrittenFile) -> Part:
    is_first = attempt.rank == (attempt.section or (0,))[0]
    return Part(
        name=attempt.name,
        world_size=attempt.world_size,
        writer=written.writer,
        specs_xxh3_128=_digest_of(attempt.specs),
        chunks=written.chunks,
        section=attempt.section,
        shared=_shared(attempt) if is_first else None,
    )


def _check_part_size(attempt: WriteAttempt, size_bytes: int) -> None:
    """Raise StateError for a part that no committer would read."""
    try:
        check_document_size(size_bytes, part_file(attempt.rank, attempt.world_size))
    except LoadError as error:
        raise StateError(
            f"the state has too many tensors for a checkpoint: {error.message}",
            hint="Save fewer, larger tensors: each chunk of each tensor takes about 170 bytes.",
        ) from error


def _put_part(storage: Storage, attempt: WriteAttempt, data: bytes) -> None:
    final = f"{attempt.name.attempt}/{part_file(attempt.rank, attempt.world_size)}"
    write_durably(storage, f"{final}.tmp", data)
    storage.rename(f"{final}.tmp", final)


def _write_share(storage: Storage, attempt: WriteAttempt, wall_time_s: float) -> WrittenFile:
    """Write the tensors. On a full disk, earlier attempts make room first."""
    write = functools.partial(
        write_share,
        storage,
        attempt.name.attempt,
        attempt.pieces,
        attempt.data,
        rank=attempt.rank,
        world_size=attempt.world_size,
        wall_time_s=wall_time_s,
    )
    try:
        return repeated(storage, write)
    except OSError as error:
        if isinstance(storage, PartStorage) or not is_full(error):
            raise
        if not free_space(storage, attempt.name):
            raise
    return repeated(storage, write)


def _written_before(storage: Storage, attempt: WriteAttempt) -> Part | None:
    """The part that this writer has written in an earlier call, if it is intact."""
    with contextlib.suppress(IncompleteAttempt, *ABSENT):
        part = read_part(storage, attempt.name, attempt.rank, attempt.world_size)
        if storage.size(f"{attempt.name.attempt}/{part.writer.file}") == part.writer.size_bytes:
            return part
    return None


def _manifest_of(storage: Storage, name: CheckpointName) -> Manifest:
    try:
        return read_manifest(storage, str(name))
    except LoadError as error:
        raise NameTaken(
            f"{name} is already saved, but cannot be read: {error.message}",
            hint="Remove its folder, or save with a new nonce.",
        ) from error


def _check_same(attempt: WriteAttempt, saved: Manifest | Part) -> None:
    """Raise :class:`NameTaken` unless this writer has saved the same state under this name.

    Otherwise, a run that goes back to an older step would keep the states of its abandoned steps,
    or mix them with new ones.
    """
    is_first = attempt.rank == (attempt.section or (0,))[0]  # its tree is saved, others' are not
    if isinstance(saved, Manifest):
        chunks = {name: tensor.chunks for name, tensor in saved.tensors.items()}
        specs = {name: tensor.spec for name, tensor in saved.tensors.items()}
        differs = saved.world_size != attempt.world_size
        differs |= any(specs.get(spec.name) != spec for spec in attempt.specs)
        if is_first and attempt.section is None:
            differs |= (saved.tree, saved.data_position) != (attempt.tree, attempt.data_position)
    else:
        chunks = dict(saved.chunks)
        differs = saved.specs_xxh3_128 != _digest_of(attempt.specs)
        if is_first and saved.shared is not None:
            before = (saved.shared.tree, saved.shared.data_position)
            differs |= before != (attempt.tree, attempt.data_position)
    file = writer_file(attempt.rank, attempt.world_size)
    hashes = {(n, c.place): c.xxh3_128 for n, cs in chunks.items() for c in cs if c.file == file}
    if differs or any(hashes.get(key, hashed) != hashed for key, hashed in _hashes(attempt)):
        raise NameTaken(
            f"{attempt.name} is already saved with another state",
            hint="A run that goes back to an older step saves as a new generation, with a new "
            "nonce: checkpoints.derive_lineage(origin, generation), checkpoints.new_nonce().",
        )


def _hashes(attempt: WriteAttempt) -> Iterator[tuple[tuple[str, Extent], str]]:
    for spec, place in attempt.pieces:
        for piece in chunks_of(place, spec.element_bytes):
            yield (spec.name, piece), digest(attempt.data(spec, piece))


def _check_others(storage: Storage, name: CheckpointName, rank: int, world_size: int) -> None:
    """Raise :class:`WriteFailed` if another writer has failed. This writer's own record, of an
    earlier try, is removed."""
    try:
        files = storage.list(name.attempt) if world_size > 1 else []
    except ABSENT:
        return  # an empty folder of an object store
    own = failure_file(rank, world_size)
    if own in files:
        storage.remove(f"{name.attempt}/{own}")
    try:
        check_no_writer_failed([file for file in files if file != own])
    except WriterFailed as failure:
        raise _of_other_writer(name, failure) from failure


def _of_other_writer(name: CheckpointName, failure: WriterFailed) -> WriteFailed:
    return WriteFailed(
        f"{name} cannot be completed: {failure}",
        hint="That writer reports the reason; the next save starts over.",
    )


def folder_removed(name: CheckpointName) -> WriteFailed:
    """The error of a writer whose attempt another process has removed: a writer that failed, whose
    record may follow, or the next world."""
    return WriteFailed(
        f"{name} cannot be completed: another process removed its folder",
        hint="A writer that failed reports the reason; the next save starts over.",
    )


def remove_share(storage: Storage, name: CheckpointName, rank: int, world_size: int) -> None:
    """Remove this writer's files from an attempt. Raises nothing."""
    part = part_file(rank, world_size)
    for file in (part, f"{part}.tmp", writer_file(rank, world_size)):
        with contextlib.suppress(OSError):
            storage.remove(f"{name.attempt}/{file}")


def give_up(storage: Storage, name: CheckpointName, rank: int, world_size: int) -> None:
    """Remove this writer's share of an attempt that cannot be committed, and tell the other
    writers. Raises nothing."""
    remove_share(storage, name, rank, world_size)
    if world_size == 1:
        discard(storage, name, rank, world_size)
    else:
        _record_failure(storage, name, rank, world_size)


def discard(storage: Storage, name: CheckpointName, rank: int, world_size: int) -> None:
    """Free the space of an attempt that will not be completed, and tell the other writers. Raises
    nothing.

    Their shares would otherwise stay until the end of this world: on a full disk, the next attempt
    needs their space. Removing the folder is atomic, so nobody commits a part of it.
    """
    with contextlib.suppress(OSError):
        if is_committed(storage, name):
            return
        storage.remove_folder(name.attempt)
    _record_failure(storage, name, rank, world_size)


def _record_failure(storage: Storage, name: CheckpointName, rank: int, world_size: int) -> None:
    if world_size > 1 and not isinstance(storage, PartStorage):
        with contextlib.suppress(OSError):  # the others then wait for their deadline
            storage.make_folder(name.attempt)
            storage.create(f"{name.attempt}/{failure_file(rank, world_size)}").close()


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
def _freed_on_failure(
    storage: Storage, name: CheckpointName, rank: int, world_size: int
) -> Iterator[None]:
    """Free the space of a failed attempt, and of earlier ones: at most one is left.

    After a lack of space nothing of it is left. Otherwise the other writers' shares are, so that
    this writer can try again.
    """
    try:
        yield
    except WriteFailed:
        raise  # another writer has recorded its failure
    except BaseException as error:
        remove_share(storage, name, rank, world_size)
        if isinstance(storage, PartStorage):
            storage.remove_if_empty(name)
            raise
        free_space(storage, name)
        if world_size == 1 or (isinstance(error, OSError) and is_full(error)):
            discard(storage, name, rank, world_size)
        else:
            _record_failure(storage, name, rank, world_size)
        # A writer that fails for lack of space removes the folder for all (see discard).
        if world_size > 1 and isinstance(error, ABSENT):
            _check_others(storage, name, rank, world_size)
            raise folder_removed(name) from error
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
