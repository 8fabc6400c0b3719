"""One save: staging, the writers' shares, tensor files, and the attempt."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch

from checkpoints.commit import (
    IncompleteAttempt,
    MissingParts,
    WriterFailed,
    check_document_size,
    check_no_writer_failed,
    commit,
    is_committed,
    read_manifest,
    read_part,
)
from checkpoints.errors import ArgumentError, LoadError, NameTaken, StateError, WriteFailed
from checkpoints.manifest import (
    Ancestor,
    Chunk,
    ChunkTable,
    Lineage,
    Manifest,
    Part,
    SharedMetadata,
    WriterEntry,
    as_lineage,
    as_text,
    digest,
)
from checkpoints.names import MAX_WORLD_SIZE, CheckpointName, failure_file, part_file, writer_file
from checkpoints.objects import Root, storage_for
from checkpoints.policies import LatestN, RetentionFunction
from checkpoints.retention import (
    FolderHistory,
    PartStorage,
    after_commit,
    free_space,
    remove_superseded,
)
from checkpoints.save_plan import (
    NamedState,
    Pieces,
    PlannedSave,
    SavePlan,
    SavePlanner,
    digest_of,
)
from checkpoints.storage import (
    ABSENT,
    Storage,
    WritableFile,
    is_full,
    patient,
    repeated,
    sync_folder,
    write_durably,
    writing,
)
from checkpoints.tensors import (
    BY_NAME,
    Extent,
    Span,
    TensorSpec,
    bytes_of,
    check_held,
    chunks_of,
    empty,
    full_region,
    share_of,
)
from checkpoints.tree import flatten, spec_of
from checkpoints.values import plain_form

T = TypeVar("T")

# ----------------------------------------------------------------------------
# Writes one rank's share as a safetensors file.
#
# Each chunk is written directly from the tensor's memory if that is contiguous and on the CPU, and
# hashed concurrently. Only the rank's own share is ever copied.

_CONCURRENT_HASH_BYTES = 1 << 20  # from this size on, a second thread hashes

Data = Callable[[TensorSpec, Extent], memoryview]
"""Reads the bytes of a chunk of a tensor."""


@dataclass(frozen=True)
class WrittenFile:
    """A tensor file on disk whose content is durable; its name is not yet."""

    writer: WriterEntry
    chunks: ChunkTable


def write_share(
    storage: Storage,
    folder: str,
    pieces: Pieces,
    data_of: Data,
    *,
    rank: int,
    world_size: int,
    wall_time_s: float,
) -> WrittenFile:
    """Write this rank's pieces and fsync them. Raises ``OSError``."""
    file = writer_file(rank, world_size)
    head = encode_header(pieces)
    written = ChunkTable()
    end = len(head)
    sink = storage.create(f"{folder}/{file}")
    hasher = ThreadPoolExecutor(1, "checkpoint-hasher")  # inherits the priority of this thread
    try:
        sink.write(head)
        for spec, place in pieces:
            chunks = []
            for piece in chunks_of(place, spec.element_bytes):
                data = data_of(spec, piece)
                hashed = _write_hashed(sink, data, hasher)
                begin, end = end, end + len(data)
                chunks.append(Chunk(file, begin, end, piece, hashed))
            written.add(spec.name, chunks)
        sink.sync()
    finally:
        hasher.shutdown()
        sink.close()
    writer = WriterEntry(rank, file, end, len(head), digest(head), wall_time_s)
    return WrittenFile(writer, written)


def _write_hashed(sink: WritableFile, data: memoryview, hasher: Executor) -> str:
    hashed = None
    if len(data) >= _CONCURRENT_HASH_BYTES:
        with contextlib.suppress(RuntimeError):  # no new threads at interpreter shutdown
            hashed = hasher.submit(digest, data)
    sink.write(data)
    return digest(data) if hashed is None else hashed.result()


def encode_header(pieces: Pieces) -> bytes:
    """The header of a safetensors file: 8 bytes of length, JSON, spaces up to a multiple of 64.

    A complete tensor has its own name and shape, so that a checkpoint of one writer is an ordinary
    safetensors file; a piece is named ``name[start:stop]``, with one range per dimension if it is a
    region.
    """
    # Entry by entry, because json.dumps holds the GIL until it returns.
    entries: dict[str, str] = {}
    begin = 0
    for spec, place in pieces:
        element = BY_NAME[spec.dtype]
        name, shape = _label(spec, place)
        while name in entries:  # a tensor may have the name of another one's piece
            name += "~"
        end = begin + place.count * element.size_bytes
        sizes = ",".join(map(str, (*shape, *element.file_shape)))
        entries[name] = (
            f'{json.dumps(name)}:{{"dtype":"{element.file_name}","shape":[{sizes}],'
            f'"data_offsets":[{begin},{end}]}}'
        )
        begin = end
    text = f"{{{','.join(entries.values())}}}".encode("ascii")
    text += b" " * (-(len(text) + 8) % 64)
    return len(text).to_bytes(8, "little") + text


def _label(spec: TensorSpec, place: Extent) -> tuple[str, tuple[int, ...]]:
    if place in (full_region(spec.shape), Span(0, spec.count)):
        return spec.name, spec.shape
    if isinstance(place, Span):
        return f"{spec.name}[{place.start}:{place.start + place.count}]", (place.count,)
    ranges = (f"{o}:{o + n}" for o, n in zip(place.offset, place.shape, strict=True))
    return f"{spec.name}[{','.join(ranges)}]", place.shape


# ----------------------------------------------------------------------------
# One writer's share of an attempt: write it, then commit if all other shares are written.
#
# Runs in any single thread, without communication; reads live tensors only through ``data``.


@dataclass(frozen=True, kw_only=True)
class SaveResult:
    """The result of a synchronous save.

    ``committed``: whether the checkpoint is committed now. With several writers it is True for the
    writers that found all parts, at least for the last one unless a writer failed. In a storage of
    parts (:mod:`checkpoints.memory`), it says that this part is stored.
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
    named: Callable[[], NamedState]  # called by the thread that writes
    section: tuple[int, ...] | None  # the ranks with the same tensors; None: all
    data: Data  # reads the bytes of a chunk
    keep: RetentionFunction | None
    fence: Callable[[], bool] | None  # called before a commit, and before ``keep`` is applied
    history: FolderHistory

    @property
    def is_current(self) -> bool:
        """Whether this world may still commit, and remove checkpoints."""
        return self.fence is None or self.fence()

    @functools.cached_property
    def state(self) -> NamedState:
        """What is saved."""
        return self.named()

    @property
    def size_bytes(self) -> int:
        """The size of this writer's share of the tensors."""
        return sum(place.count * spec.element_bytes for spec, place in self.state.pieces)


@dataclass(frozen=True)
class WrittenShare:
    """A share that is durable: its part, and the number of bytes that this call has written."""

    part: Part
    bytes_written: int


def write_unless_committed(
    storage: Storage, attempt: WriteAttempt, clock: Callable[[], float]
) -> WrittenShare | None:
    """Write the share; None if the checkpoint is already committed. Raises :class:`SaveError`."""
    with writing(storage.place):
        if is_committed(storage, attempt.name):
            _check_same(attempt, _manifest_of(storage, attempt.name))
            return None
        return write_once(storage, attempt, clock)


def commit_if_complete(
    storage: Storage,
    attempt: WriteAttempt,
    written: WrittenShare,
    *,
    on_committed: Callable[[], object] = lambda: None,
) -> SaveResult:
    """Commit if all shares are present and the fence allows it, then remove older checkpoints.

    ``on_committed`` is called after the commit attempt, before they are removed. Raises
    :class:`SaveError`.
    """
    name = attempt.name
    why = "" if attempt.is_current else "fenced: this world is stale"
    is_waiting = False
    if not why and not isinstance(storage, PartStorage):
        with writing(storage.place):
            try:
                _commit(storage, attempt, written.part)
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
            except ABSENT as error:
                raise folder_removed(name) from error
    on_committed()
    if why:
        notes: tuple[str, ...] = (f"not committed: {why}",)
    elif isinstance(storage, PartStorage):
        notes = storage.part_written(name, attempt.keep)
    else:
        notes = after_commit(storage, name, attempt.keep, attempt.history)
    return SaveResult(
        name=str(name),
        step=name.step,
        bytes_written=written.bytes_written,
        committed=not why,
        is_waiting=is_waiting,
        notes=notes,
    )


def _commit(storage: Storage, attempt: WriteAttempt, own: Part) -> None:
    """Commit. If that fails, earlier attempts are removed: only one is kept for a later try."""
    try:
        manifest = _with_room(
            storage, attempt, lambda: commit(storage, attempt.name, attempt.world_size, own)
        )
    except OSError:
        remove_superseded(storage, attempt.name)
        raise
    if manifest is not None:
        attempt.history.remember(manifest)


def _with_room(storage: Storage, attempt: WriteAttempt, write: Callable[[], T]) -> T:
    """The result of ``write``, repeated as a write to that storage. On a full disk, what is no
    longer needed makes room first."""
    keep = attempt.keep if attempt.is_current else None
    freed = free_space(storage, attempt.name, keep)
    while True:
        try:
            return repeated(storage, write)
        except OSError as error:
            # A storage of parts makes room before it writes.
            if isinstance(storage, PartStorage) or not is_full(error):
                raise
            if next(freed, "nothing") is not None:
                raise


def write_once(storage: Storage, attempt: WriteAttempt, clock: Callable[[], float]) -> WrittenShare:
    """Write this rank's file and part unless they exist."""
    name, rank, world_size = attempt.name, attempt.rank, attempt.world_size
    repeated(storage, lambda: storage.make_folder(""))
    _with_room(storage, attempt, lambda: storage.make_folder(name.attempt))
    part = _written_before(storage, attempt)
    if part is not None:
        _check_same(attempt, part)
        return WrittenShare(part, 0)  # a committer may be reading it
    with _freed_on_failure(storage, name, rank, world_size):
        _check_others(storage, name, rank, world_size)
        if isinstance(storage, PartStorage):
            storage.make_room(name, attempt.size_bytes)
        written = _write_share(storage, attempt, clock())
        part = _part_of(attempt, written)
        data = part.to_bytes()
        _check_part_size(attempt, len(data))
        _with_room(storage, attempt, lambda: _put_part(storage, attempt, data))
    with contextlib.suppress(FileNotFoundError):  # committed by another writer meanwhile
        repeated(storage, lambda: sync_folder(storage, name.attempt))
    return WrittenShare(part, written.writer.size_bytes + len(data))


def _part_of(attempt: WriteAttempt, written: WrittenFile) -> Part:
    is_first = attempt.rank == (attempt.section or (0,))[0]
    return Part(
        name=attempt.name,
        world_size=attempt.world_size,
        writer=written.writer,
        specs_xxh3_128=attempt.state.specs_xxh3_128,
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
    write = functools.partial(
        write_share,
        storage,
        attempt.name.attempt,
        attempt.state.pieces,
        attempt.data,
        rank=attempt.rank,
        world_size=attempt.world_size,
        wall_time_s=wall_time_s,
    )
    return _with_room(storage, attempt, write)


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
        differs |= any(specs.get(name) != spec for name, spec in attempt.state.specs.items())
        if is_first and attempt.section is None:
            differs |= _content_of(saved) != _content_of(attempt)
    else:
        chunks = dict(saved.chunks)
        differs = saved.specs_xxh3_128 != attempt.state.specs_xxh3_128
        if is_first and saved.shared is not None:
            differs |= _content_of(saved.shared) != _content_of(attempt)
    file = writer_file(attempt.rank, attempt.world_size)
    hashes = {(n, c.place): c.xxh3_128 for n, cs in chunks.items() for c in cs if c.file == file}
    if differs or any(hashes.get(key, hashed) != hashed for key, hashed in _hashes(attempt)):
        raise NameTaken(
            f"{attempt.name} is already saved with another state",
            hint="A run that goes back to an older step saves as a new generation, with a new "
            "nonce: checkpoints.derive_lineage(origin, generation), checkpoints.new_nonce().",
        )


def _content_of(saved: Manifest | SharedMetadata | WriteAttempt) -> tuple[object, ...]:
    """What a checkpoint holds besides tensors."""
    state = saved.state if isinstance(saved, WriteAttempt) else saved
    return state.tree, {as_text(entry) for entry in state.types}, saved.data_position


def _hashes(attempt: WriteAttempt) -> Iterator[tuple[tuple[str, Extent], str]]:
    for spec, place in attempt.state.pieces:
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
    record may follow, the next world, or another run."""
    return WriteFailed(
        f"{name} cannot be completed: another process removed its folder",
        hint="A writer that failed reports the reason; a newer run in this folder removes what "
        "older ones have not committed. The next save starts over.",
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


def _shared(attempt: WriteAttempt) -> SharedMetadata:
    return SharedMetadata(
        lineage=attempt.lineage,
        data_position=attempt.data_position,
        versions=_versions(),
        specs=attempt.state.specs,
        tree=attempt.state.tree,
        types=attempt.state.types,
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
        remove_superseded(storage, name)
        if world_size == 1 or (isinstance(error, OSError) and is_full(error)):
            discard(storage, name, rank, world_size)
        else:
            _record_failure(storage, name, rank, world_size)
        # A writer that fails for lack of space removes the folder for all (see discard).
        if isinstance(error, ABSENT):
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


# ----------------------------------------------------------------------------
# The types of asynchronous saves: the group of writers, the handle and the outcome of a save.


@dataclass(frozen=True, kw_only=True)
class WriterGroup:
    """The writers of one checkpoint, seen from one rank; nonce and generation are equal on all.

    ``section``: the ranks that save the same tensors as this one, in order; by default all. The
    states of several sections are dicts with different keys, and form one checkpoint with all keys.
    ``fence`` is called before a commit, on the writer thread: False means that this world has
    ended.
    """

    nonce: str
    generation: int = 0
    rank: int = 0
    size: int = 1
    lineage: Lineage = ()
    section: tuple[int, ...] | None = None
    fence: Callable[[], bool] | None = field(default=None, compare=False)


class WriterThreadDied(RuntimeError):
    """The engine's writer thread was ended by its ``__cause__``. No more saves are possible."""


class SaveStatus(Enum):
    """The final status of a save."""

    COMMITTED = "committed"  # by any writer
    FAILED = "failed"  # the storage failed; see ``reason``
    ABANDONED = "abandoned"  # not committed within the deadline
    STALE = "stale"  # fenced: a newer world exists
    SKIPPED = "skipped"  # all buffers were busy; nothing was staged


@dataclass(frozen=True, kw_only=True)
class SaveOutcome:
    """The outcome of an asynchronous save.

    ``stall_s`` is how long training was blocked, ``write_s`` how long the writer took until its
    share was durable or the checkpoint committed, ``took_s`` the total time, including the removal
    of older checkpoints, or until the save was abandoned.
    """

    step: int
    name: str
    status: SaveStatus
    reason: str = ""
    error: Exception | None = None
    bytes_written: int = 0
    stall_s: float = 0.0
    write_s: float = 0.0
    took_s: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass
class SaveHandle:
    """A save in flight."""

    name: str
    step: int
    outcome: SaveOutcome | None = None
    is_written: bool = False  # this writer has written its share, or never will
    ended: threading.Event = field(default_factory=threading.Event, repr=False)

    def wait(self, timeout_s: float | None = None) -> SaveOutcome | None:
        """Wait for the outcome; None if the save has not ended after ``timeout_s``."""
        self.ended.wait(timeout_s)
        return self.outcome


# ----------------------------------------------------------------------------
# A save, as passed from the caller's thread to the writer thread.


@dataclass(eq=False)
class SaveJob:
    """The input of the writer thread for one save, and its progress."""

    attempt: WriteAttempt
    handle: SaveHandle
    fence: Callable[[], bool] | None
    began_s: float
    stall_s: float
    deadline_s: float  # on the monotonic clock; renewed by progress
    write_s: float = 0.0
    written: WrittenShare | None = None  # None: not written yet
    written_s: float = 0.0  # on the monotonic clock
    poll_at_s: float = 0.0  # when to look for other writers' parts
    problem: str = ""  # why it could not be committed yet
    seen: tuple[int, int] = (-1, 0)  # the first missing writer, and the size of its share


class Progress:
    """When the writer thread last wrote a chunk, and how long it had to wait for one.

    It is entered while a share is written. A pause that has ended was a slow storage, not a hung
    one: later saves are given twice the longest.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self.last_s = monotonic()
        self.patience_s = 0.0

    def watched(self, data: Data) -> Data:
        """``data``, which is called before each chunk is written, and counts as progress."""

        def read(spec: TensorSpec, place: Extent) -> memoryview:
            self._made()
            return data(spec, place)

        return read

    def _made(self) -> None:
        before_s, self.last_s = self.last_s, self._monotonic()
        self.patience_s = max(self.patience_s, 2 * (self.last_s - before_s))

    def __enter__(self) -> None:
        self.last_s = self._monotonic()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._made()


# ----------------------------------------------------------------------------
# Synchronous save: write this rank's share, commit if all shares exist. No collectives.

Clock = Callable[[], float]
"""Returns seconds since 1970; recorded and displayed, never used for decisions."""


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
    section: tuple[int, ...] | None = None,
    data_position: Any = None,
    keep: RetentionFunction | None = LatestN(3),  # noqa: B008  frozen
    fence: Callable[[], bool] | None = None,
    clock: Clock = time.time,
    progress: Callable[[int], object] | None = None,
) -> SaveResult:
    """Write this rank's share of ``state``, and commit if all ``world_size`` shares exist.

    Every rank of a world calls it with the same tensors, step, generation and nonce; no rank waits
    for another. ``state`` is a tree of dicts, lists and tuples of JSON values and tensors; values
    that are not tensors are saved from rank 0. Each rank writes its shard of a DTensor (FSDP2,
    tensor parallelism), or an equal slice of a replicated one; ``rank`` and ``world_size`` are then
    those of torch.distributed. ``nonce`` identifies the world: shared by its writers and by no
    others (:func:`checkpoints.new_nonce`). ``section``: the ranks that save the same tensors as
    this one, if others save other keys of the state (:class:`WriterGroup`). ``data_position`` is
    any JSON value, returned on load. ``keep`` is applied after the commit, and before it if the
    storage is full. ``fence`` is called before each: False means that this world is stale, and the
    attempt stays uncommitted. ``progress`` is called with the number of bytes of each chunk before
    it is written.

    Saving a committed step again writes nothing and returns ``committed=True``; with another state
    it raises :class:`NameTaken`: a run that goes back to an older step needs a new nonce.

    Raises :class:`ArgumentError` and :class:`StateError` before anything is written, and
    :class:`SaveError` if the storage fails; older checkpoints are unchanged in every case, and a
    failed attempt leaves nothing that takes space.
    """
    check_world(rank, world_size, section)
    name = CheckpointName(step, generation, nonce)
    check_json(data_position)
    ancestors = lineage_of(name, lineage)
    storage = patient(storage_for(root))
    plain, types = plain_form(state)
    tree, tensors = flatten(plain)
    specs = {key: spec_of(key, tensor) for key, tensor in tensors.items()}

    pieces = share_of(tuple(specs.values()), world_size, rank, section)
    for spec, place in pieces:  # reading them while writing would fail the other writers, too
        check_held(tensors[spec.name], place)

    def data(spec: TensorSpec, place: Extent) -> memoryview:
        if progress is not None:
            progress(place.count * spec.element_bytes)
        return bytes_of(tensors[spec.name], place)

    attempt = WriteAttempt(
        name=name,
        rank=rank,
        world_size=world_size,
        lineage=ancestors,
        data_position=data_position,
        named=lambda: NamedState(specs, digest_of(specs), pieces, tree, types),
        section=section,
        data=data,
        keep=keep,
        fence=fence,
        history=FolderHistory(),
    )
    written = write_unless_committed(storage, attempt, clock)
    if written is None:
        return SaveResult(name=str(name), step=step, bytes_written=0, committed=True)
    return commit_if_complete(storage, attempt, written)


def buffer_wait_s(busy: Literal["skip", "wait"] | None, writers: int, deadline_s: float) -> float:
    """How long a save of ``writers`` ranks waits for a free buffer.

    Raises :class:`ArgumentError` if several writers would each decide alone whether to skip.
    """
    if busy == "skip" and writers > 1:
        raise ArgumentError(
            f'busy="skip" with {writers} writers: each would decide by its own buffers, and a save '
            'that lacks a share is never committed. Omit busy or use busy="wait"; if all ranks '
            "have agreed on Engine.has_free_buffer, pass wait_s=0.0 to save_async"
        )
    waits = busy == "wait" or (busy is None and writers > 1)
    return deadline_s if waits else 0.0


def check_world(rank: int, world_size: int, section: tuple[int, ...] | None = None) -> None:
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise ArgumentError(f"world_size {world_size} is not between 1 and {MAX_WORLD_SIZE}")
    if not 0 <= rank < world_size:
        raise ArgumentError(f"rank {rank} is not between 0 and {world_size - 1}")
    if section is None:
        return
    is_ordered = bool(section) and list(section) == sorted(set(section))
    if not is_ordered or not 0 <= section[0] <= section[-1] < world_size:
        raise ArgumentError(
            f"section {section} is not an ordered tuple of ranks below {world_size}"
        )
    if rank not in section:
        raise ArgumentError(f"rank {rank} is not in its section {section}")


def check_json(data_position: Any) -> None:
    try:
        text = json.dumps(data_position, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise StateError(f"data_position is not strict JSON: {error}") from error
    if json.loads(text) != data_position:
        raise StateError(
            f"data_position would be loaded as another value: {text[:200]}",
            hint="Use lists instead of tuples, and strings as the keys of dicts.",
        )


def lineage_of(name: CheckpointName, pairs: Iterable[Ancestor | tuple[int, int]]) -> Lineage:
    lineage = as_lineage(pairs)
    if lineage and lineage[-1].generation != name.generation:
        raise ArgumentError(
            f"the lineage ends with generation {lineage[-1].generation}, "
            f"but the checkpoint belongs to generation {name.generation}",
            hint="checkpoints.derive_lineage(origin, generation) returns it.",
        )
    if lineage and lineage[-1].began_at_step > name.step:
        raise ArgumentError(
            f"generation {name.generation} began at step {lineage[-1].began_at_step}, "
            f"after step {name.step}"
        )
    return lineage


# ----------------------------------------------------------------------------
# Staging: copies this rank's share of the live tensors into reusable host buffers.
#
# The copy is the only stall of an asynchronous save. A buffer holds exactly the body of the
# writer's file, is pinned if tensors are on CUDA devices, and never shrinks.


class StagingBuffer:
    """Host memory for one staged share; has one owner at a time."""

    def __init__(self) -> None:
        self.owner: object | None = None  # changed by the pool only
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    def reserve(self, size_bytes: int, *, pinned: bool) -> None:
        """Allocate the memory and fault its pages in, so that the first save is not slower."""
        if self._allocate(size_bytes, pinned=pinned):
            self._bytes.fill_(1)  # writing zeros might not fault the pages in

    def _allocate(self, size_bytes: int, *, pinned: bool) -> bool:
        """Whether there is new memory, whose pages the next copy into it faults in."""
        if self._bytes.numel() < size_bytes or (pinned and not self._bytes.is_pinned()):
            # Free the old buffer before allocating the new one.
            self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
            self._bytes = (
                torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
                if pinned
                else empty((size_bytes,), torch.uint8)
            )
            return True
        return False

    def fill(
        self, planner: SavePlanner, state: object, group: WriterGroup
    ) -> tuple[PlannedSave, Data]:
        """Copy this rank's share of ``state``; the tensors may change once this returns. Returns
        its plan and a reader of the bytes.

        Raises as :meth:`SavePlanner.plan` does.
        """

        def memory(plan: SavePlan) -> torch.Tensor:
            self._allocate(plan.size_bytes, pinned=bool(plan.gpus))
            return self._bytes

        planned = planner.copy(
            state, memory, world_size=group.size, rank=group.rank, section=group.section
        )
        plan, staged = planned.plan, self._bytes.numpy().data

        def data(spec: TensorSpec, chunk: Extent) -> memoryview:
            begin = plan.content().begin_of(spec, chunk)
            return staged[begin : begin + chunk.count * spec.element_bytes]

        return planned, data


class StagingPool:
    """A fixed number of staging buffers, shared by the training thread and the writer thread.

    A buffer is free if it has no owner. Its owner is recorded in the same statement that takes it
    and never passed along, so an exception at any point of a save, such as KeyboardInterrupt,
    leaves no buffer that :meth:`release` would not find.
    """

    def __init__(self, count: int) -> None:
        self._buffers = [StagingBuffer() for _ in range(count)]
        self._released = threading.Condition()

    @property
    def has_free(self) -> bool:
        return any(buffer.owner is None for buffer in self._buffers)

    def acquire(self, owner: object, wait_s: float) -> StagingBuffer | None:
        """A buffer of ``owner``; None if none is free within ``wait_s``."""
        until_s = time.monotonic() + wait_s
        with self._released:
            while True:
                for buffer in self._buffers:
                    if buffer.owner is None:
                        buffer.owner = owner
                        return buffer
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return None
                self._released.wait(min(left_s, threading.TIMEOUT_MAX))

    def release(self, owner: object) -> None:
        """Free the buffer of ``owner``, if it has one."""
        with self._released:
            for buffer in self._buffers:
                if buffer.owner is owner:
                    buffer.owner = None
            self._released.notify_all()

    def reserve(self, size_bytes: int, *, pinned: bool) -> None:
        """Grow the free buffers one at a time, so that a concurrent save finds the other one."""
        for buffer in self._buffers:
            owner = object()
            try:
                with self._released:
                    if buffer.owner is not None:
                        continue
                    buffer.owner = owner
                # A lack of memory is reported by the save that needs it.
                with contextlib.suppress(MemoryError, RuntimeError):
                    buffer.reserve(size_bytes, pinned=pinned)
            finally:
                self.release(owner)
