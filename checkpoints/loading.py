"""Loads checkpoints: which one, what each rank reads, and what ranks exchange."""

from __future__ import annotations

import contextlib
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from checkpoints import errors
from checkpoints.commit import committed_names, read_manifest
from checkpoints.errors import CorruptCheckpoint, LoadError, ReadFailed, StateMismatch, TornRead
from checkpoints.manifest import (
    Ancestor,
    CheckpointInfo,
    Chunk,
    Lineage,
    TensorEntry,
    as_lineage,
    digest,
    info_of,
    why_abandoned,
)
from checkpoints.names import CheckpointName
from checkpoints.objects import Root
from checkpoints.plan import LoadPlan, live_regions, prepare
from checkpoints.reader import (
    STEP_BYTES,
    Item,
    MappedCheckpoint,
    TensorBuffer,
    all_chunks,
    into_buffers,
    read_chunks,
    scratch,
)
from checkpoints.storage import Storage, page_cache_identity, reading
from checkpoints.tensors import BY_NAME
from checkpoints.tiers import readable

if TYPE_CHECKING:
    import torch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


# ----------------------------------------------------------------------------
# Collective loads: each rank reads a share, the ranks exchange their shares, and a failure of one
# rank is raised on all.
#
# Uses only collectives of the caller's group, in the same order on every rank: the ranks first
# agree on the manifest, which determines the exchange. Reports are JSON; nothing is unpickled. If
# a rank dies, the group fails or times out on the others.

UNPACKED_BYTES = 1 << 20  # larger chunks are sent from, and received into, their buffer directly
PACKED_BYTES = 16 << 20
_IN_FLIGHT = 4  # concurrent messages: bounds the memory for packed ones
_ALIGNMENT = 64
_SIZE_BYTES = 8
_SHORT_BYTES = 1024  # nearly every report fits


def shares_of(items: Sequence[Item], size: int) -> tuple[tuple[Item, ...], ...]:
    """Split items into one run per rank, of about equal bytes."""
    total = sum(_size(item) for item in items)
    shares: list[list[Item]] = [[] for _ in range(size)]
    begin = 0
    for item in items:
        middle = begin + _size(item) // 2
        shares[min(middle * size // max(total, 1), size - 1)].append(item)
        begin += _size(item)
    return tuple(map(tuple, shares))


class Stage:
    """What this rank reports at the end of a stage, and the combined result of all ranks."""

    def __init__(self) -> None:

        self.fact = ""
        self.files: str | None = None
        self.share_page_cache = False  # known after the stage

    def must_agree(self, fact: str) -> None:
        """Record a value that must be equal on all ranks."""
        self.fact = fact

    def reads(self, files: str | None) -> None:
        """Record which files this rank reads; None if unknown."""
        self.files = files


class LoadGroup(ABC):
    """The ranks of a collective load."""

    rank: int
    size: int
    device: torch.device  # of the tensors in its collectives

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int) -> Callable[[], object]:
        """Begin to send the tensor of ``source`` to all ranks; returns a function that waits."""

    @abstractmethod
    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> None:
        """Gather the tensors of all ranks, in their order."""

    def working(self) -> AbstractContextManager[object]:
        """A context for the work of this rank between two collectives."""
        return nullcontext()

    def failure(self, error: RuntimeError, state: str) -> Exception:
        """The exception to raise for a failure of the group. ``state``: of the live tensors.

        It says nothing about the checkpoint, so a program that goes back to an older one after a
        LoadError raises another exception.
        """
        return LoadError(
            f"the process group failed while loading: {error}",
            hint=f"{state} Create a new process group and load again.",
        )


class _TorchGroup(LoadGroup):
    """A group of torch.distributed."""

    def __init__(self, group: ProcessGroup) -> None:
        import torch
        import torch.distributed as dist

        self._dist = dist
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        backend = str(dist.get_backend(group))
        only_gpu = "nccl" in backend and "gloo" not in backend
        self.device = torch.device("cuda" if only_gpu else "cpu")

    def broadcast(self, tensor: torch.Tensor, source: int) -> Callable[[], object]:
        work = self._dist.broadcast(tensor, group=self._group, group_src=source, async_op=True)
        assert work is not None  # this rank is in the group
        return lambda: work.wait()

    def all_gather(self, outputs: list[torch.Tensor], tensor: torch.Tensor) -> None:
        self._dist.all_gather(outputs, tensor, group=self._group)


class Exchange:
    """The ranks of a group while they load one checkpoint."""

    def __init__(self, group: LoadGroup | ProcessGroup) -> None:
        self._group = group if isinstance(group, LoadGroup) else _TorchGroup(group)
        self.rank = self._group.rank
        self.size = self._group.size
        self.hint = "The tensors are unchanged."  # of a failure of the group
        self._device = self._group.device

    @contextmanager
    def stage(self) -> Iterator[Stage]:
        """A stage that either all ranks complete or none: a failure of one is raised on all."""
        here, failure = Stage(), None
        try:
            with self._group.working():
                yield here
        except Exception as error:  # noqa: BLE001  reported to all ranks and raised below
            failure = error
        mine = {
            "failure": failure and error_as_json(failure),
            "fact": here.fact,
            "files": here.files,
        }
        reports = self._all_reports(mine)
        for rank, report in enumerate(reports):
            if report["failure"] is None:
                continue
            if rank == self.rank and failure is not None:
                raise failure
            raise error_from_json(report["failure"], rank) from failure
        for rank, report in enumerate(reports):
            if report["fact"] != reports[0]["fact"]:
                raise LoadError(
                    f"rank {rank} and rank 0 load different checkpoints, or into states of "
                    "different structure",
                    hint="Use the same name, structure and sharding on all ranks.",
                )
        files = {report["files"] for report in reports}
        here.share_page_cache = len(files) == 1 and None not in files

    def all_gather(
        self, shares: Sequence[Sequence[Item]], buffers: Mapping[str, TensorBuffer]
    ) -> None:
        """Exchange the shares that the ranks have read.

        Uses broadcasts: gloo's all_gather moved 0.2 GB/s, its broadcast 1.2 GB/s (measured). What
        arrives is hashed again, which takes a tenth of that time: the checksums of TCP miss errors.
        """
        damaged: list[str] = []
        messages = [list(_messages(share)) for share in shares]
        turns = itertools.zip_longest(*messages, fillvalue=())
        flow = [(rank, m) for turn in turns for rank, m in enumerate(turn) if m]
        for first in range(0, len(flow), _IN_FLIGHT):
            batch = flow[first : first + _IN_FLIGHT]
            with self._translated():
                sent = [(r, m, *self._start(r, m, buffers)) for r, m in batch]
                for rank, message, buffer, wait in sent:
                    wait()
                    if rank != self.rank:
                        damaged += self._unpack(message, buffer, buffers)
        with self.stage():  # no rank changes a live tensor before all ranks have all bytes
            if damaged:
                why = RuntimeError(f"{', '.join(damaged[:3])} changed on the network")
                raise self._group.failure(why, self.hint)

    def _start(
        self, rank: int, message: Sequence[Item], buffers: Mapping[str, TensorBuffer]
    ) -> tuple[torch.Tensor, Callable[[], object]]:
        """Broadcast a message of ``rank``: directly from its buffer if contiguous, else packed."""
        import torch

        buffer = self._in_place(message, buffers)
        if buffer is None:
            buffer = torch.empty(sum(map(_padded_size, message)), dtype=torch.uint8, device="cpu")
            if rank == self.rank:
                for (tensor, chunk), offset in _with_offsets(message):
                    data = buffers[tensor.spec.name].get(chunk.place).view(torch.uint8)
                    buffer[offset : offset + data.numel()] = data
        buffer = buffer.to(self._device)
        return buffer, self._group.broadcast(buffer, rank)

    def _unpack(
        self, message: Sequence[Item], buffer: torch.Tensor, buffers: Mapping[str, TensorBuffer]
    ) -> list[str]:
        """Copy a received message to its place; returns the tensors of damaged bytes."""
        memory = self._in_place(message, buffers)
        here, damaged = buffer.cpu(), []
        for (tensor, chunk), offset in _with_offsets(message):
            data = here[offset : offset + chunk.end - chunk.begin]
            if digest(data.numpy().data) != chunk.xxh3_128:
                damaged.append(f"{tensor.spec.name!r} ({chunk.file})")
            elif memory is None:
                target = buffers[tensor.spec.name]
                target.put(chunk.place, data.view(BY_NAME[tensor.spec.dtype].torch))
        if memory is not None and memory.data_ptr() != buffer.data_ptr():
            memory.copy_(buffer)
        return damaged

    def _in_place(
        self, message: Sequence[Item], buffers: Mapping[str, TensorBuffer]
    ) -> torch.Tensor | None:
        """The buffer of a single-chunk message. All ranks agree: complete tensors have one
        layout."""
        import torch

        if len(message) != 1:
            return None
        tensor, chunk = message[0]
        memory = buffers[tensor.spec.name].contiguous_view(chunk.place)
        return None if memory is None else memory.view(torch.uint8)

    def _all_reports(self, report: Mapping[str, object]) -> list[dict[str, Any]]:
        """All ranks' reports, in one collective unless one of them is long."""
        text = json.dumps(report).encode()
        size = len(text).to_bytes(_SIZE_BYTES, "little")
        gathered = self._gathered((size + text)[:_SHORT_BYTES], _SHORT_BYTES)
        longest = max(int.from_bytes(data[:_SIZE_BYTES], "little") for data in gathered)
        if _SIZE_BYTES + longest > _SHORT_BYTES:
            gathered = self._gathered(size + text, _SIZE_BYTES + longest)
        return [json.loads(data[_SIZE_BYTES:]) for data in gathered]

    def _gathered(self, data: bytes, size: int) -> list[bytes]:
        """All ranks' bytes, padded with spaces to ``size``."""
        import torch

        padded = torch.frombuffer(bytearray(data.ljust(size)), dtype=torch.uint8)
        gathered = torch.empty((self.size, size), dtype=torch.uint8, device=self._device)
        with self._translated():
            self._group.all_gather(list(gathered), padded.to(self._device))
        return [row.numpy().tobytes() for row in gathered.cpu()]

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self._group.failure(error, self.hint) from error


def _messages(share: Sequence[Item]) -> Iterator[list[Item]]:
    """Large chunks in one message each, small ones packed."""
    packed: list[Item] = []
    size = 0
    for item in share:
        if _size(item) >= UNPACKED_BYTES:
            yield [item]
            continue
        if packed and size + _padded_size(item) > PACKED_BYTES:
            yield packed
            packed, size = [], 0
        packed.append(item)
        size += _padded_size(item)
    if packed:
        yield packed


def _with_offsets(message: Sequence[Item]) -> Iterator[tuple[Item, int]]:
    offset = 0
    for item in message:
        yield item, offset
        offset += _padded_size(item)


def _size(item: Item) -> int:
    return item[1].end - item[1].begin


def _padded_size(item: Item) -> int:
    """The size, aligned so that received bytes can be viewed as elements in place."""
    return -(-_size(item) // _ALIGNMENT) * _ALIGNMENT


def error_as_json(error: Exception) -> dict[str, Any]:
    fields: dict[str, Any] = {"type": type(error).__name__, "message": repr(error), "hint": ""}
    if isinstance(error, LoadError):
        fields.update(message=error.message, hint=error.hint)
    if isinstance(error, CorruptCheckpoint):
        fields.update(reason=error.reason, file=error.file, tensor=error.tensor)
    if isinstance(error, StateMismatch):
        fields.update(missing=error.missing, extra=error.extra, mismatched=error.mismatched)
    return fields


def error_from_json(fields: Mapping[str, Any], rank: int) -> LoadError:
    """The error of another rank, with its rank in the message."""
    kind = getattr(errors, fields["type"], LoadError)
    error: LoadError
    if kind is CorruptCheckpoint:
        error = CorruptCheckpoint(fields["reason"], file=fields["file"], tensor=fields["tensor"])
    elif kind is StateMismatch:
        lists = {key: tuple(fields[key]) for key in ("missing", "extra", "mismatched")}
        error = StateMismatch("the checkpoint", **lists)
    elif kind is TornRead:
        error = TornRead("the checkpoint")
    else:
        known = isinstance(kind, type) and issubclass(kind, LoadError)
        error = (kind if known else LoadError)(fields["message"], hint=fields["hint"])
    error.message, error.rank = f"on rank {rank}: {fields['message']}", rank
    return error


# ----------------------------------------------------------------------------
# Load a checkpoint: verify it in buffers first, then copy it into the live tensors.

Progress = Callable[[int], object]
"""Called with a number of bytes, from several threads."""


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    """The result of a load.

    ``state`` is the complete saved state, with the live tensors that were loaded into. With
    ``strict=False``, ``unmatched`` lists the tensors that were not copied, and the values whose
    class this process does not have and which are returned as plain ones, each with the reason.
    """

    state: Any
    info: CheckpointInfo
    unmatched: tuple[str, ...] = ()


def load(
    root: Root,
    name: str,
    *,
    into: object = None,
    strict: bool = True,
    only: str | None = None,
    group: ProcessGroup | LoadGroup | None = None,
    progress: Progress | None = None,
) -> LoadResult:
    """Load a checkpoint by name, regardless of the world size that saved it.

    With ``into``, a state of the same structure with live tensors, values are copied into these
    tensors once every byte they need is verified; leaves that are not tensors are returned, as the
    types that they had: a class must be imported already.
    DTensors receive their shards, however the tensor was sharded when saved. Tensors that differ in
    path, shape or dtype raise :class:`StateMismatch`; with ``strict=False`` the others are copied.

    ``only``: a key of the saved state; nothing else is read, matched or returned.

    With ``group``, a process group of torch.distributed, its ranks load collectively. Each rank
    reads and verifies an equal share of the bytes that all ranks need, and its own shards of
    sharded tensors. The ranks exchange the shares over the group or, on one host, through the page
    cache. The first failure of any rank is raised on all, before any rank has changed a tensor. All
    ranks must pass the same name, and states of the same structure. They wait for the slowest one
    for as long as the group's timeout allows.

    ``progress`` is called, from several threads, with the number of bytes of each chunk read.

    Raises :class:`ArgumentError` for a ``root`` that names no storage; :class:`StateError` if
    ``into`` has two tensors of one path (``{0: a, "0": b}``); :class:`CheckpointNotFound`,
    :class:`CorruptCheckpoint`, :class:`UnsupportedFormat`, :class:`ReadFailed`,
    :class:`StateMismatch`, also for live tensors that cannot be written (on the meta device, or
    expanded); :class:`LoadError` for a value of a class that is not imported, and with ``group``,
    if the group itself fails. Files on a memory file system are verified and copied from a mapping;
    if they change in between, :class:`TornRead`.
    """
    storage = readable(root)
    if group is not None:
        return _load_in_group(storage, name, into, strict, only, Exchange(group), progress)
    plan = prepare(storage, name, into, strict, only)
    files = plan.mapped_files()
    if files is not None:
        with contextlib.closing(files):
            mapped = _MappedLoad(plan, files)
            mapped.verify(all_chunks(plan.manifest), None, progress)
            return mapped.take()
    job = _LoadJob(plan, plan.buffers())
    job.read(all_chunks(plan.manifest), progress=progress)
    return job.finish()


class _MappedLoad:
    """Verify memory-mapped files, then copy from the mapping into the live tensors.

    Faster than reading into fresh memory first, and needs no memory for a second copy.
    """

    def __init__(self, plan: LoadPlan, files: MappedCheckpoint) -> None:

        self._plan = plan
        self._files = files
        self._job = _LoadJob(plan, plan.live_memory())

    def verify(
        self, items: Iterable[Item], headers: Collection[int] | None, progress: Progress | None
    ) -> None:
        """Verify the needed chunks among ``items``; other ranks may verify the rest."""
        self._files.verify(self._job.needed(items), headers, progress)

    def take(self) -> LoadResult:
        """Copy the verified bytes. Raises TornRead if the files have changed meanwhile."""
        import torch

        every = all_chunks(self._plan.manifest)
        try:
            with torch.no_grad():
                self._files.copy(self._job.needed(every), self._job.buffers)
            changed = self._files.have_changed()
        except LoadError as error:
            raise TornRead(str(self._plan.manifest.name)) from error
        if changed:
            raise TornRead(str(self._plan.manifest.name))
        return self._job.finish()


def _load_in_group(
    storage: Storage,
    name: str,
    into: object,
    strict: bool,
    only: str | None,
    exchange: Exchange,
    progress: Progress | None,
) -> LoadResult:
    with contextlib.ExitStack() as stack:
        with exchange.stage() as here:
            plan = prepare(storage, name, into, strict, only)
            here.must_agree(plan.fingerprint())
            files, identity = plan.mapped_files(), page_cache_identity(storage, name)
            if files is not None:
                stack.enter_context(contextlib.closing(files))
                identity = identity and f"{identity} {files.identity}"
            here.reads(identity)
        shares = _Shares.of(plan, exchange)
        if here.share_page_cache and files is not None:
            return _load_mapped(_MappedLoad(plan, files), shares, exchange, progress)
        if here.share_page_cache:
            return _load_through_page_cache(plan, shares, exchange, progress)
        with exchange.stage():
            job = _LoadJob(plan, plan.buffers())
            job.read(shares.own, headers=shares.headers, progress=progress)
        exchange.all_gather(shares.common, job.buffers)
        return job.finish()


@dataclass(frozen=True)
class _Shares:
    """Which rank of a collective load reads what."""

    common: tuple[tuple[Item, ...], ...]  # of the bytes that all ranks need, by rank
    own: list[Item]  # this rank's share, and what only this rank needs
    rest: list[Item]  # the other ranks' shares
    headers: Collection[int]

    @classmethod
    def of(cls, plan: LoadPlan, exchange: Exchange) -> _Shares:
        items = all_chunks(plan.manifest)
        rank, size = exchange.rank, exchange.size
        common = shares_of([i for i in items if i[0].spec.name in plan.complete], size)
        alone = [item for item in items if item[0].spec.name not in plan.complete]
        rest = [item for other, share in enumerate(common) if other != rank for item in share]
        headers = range(rank, len(plan.manifest.writers), size)
        return cls(common, [*common[rank], *alone], rest, headers)


def _load_mapped(
    mapped: _MappedLoad, shares: _Shares, exchange: Exchange, progress: Progress | None
) -> LoadResult:
    """Ranks that map the same files: each verifies a share, then each copies everything."""
    with exchange.stage():
        mapped.verify(shares.own, shares.headers, progress)
    exchange.hint = "The live tensors may hold the checkpoint already."
    with exchange.stage():
        return mapped.take()


def _load_through_page_cache(
    plan: LoadPlan, shares: _Shares, exchange: Exchange, progress: Progress | None
) -> LoadResult:
    """Ranks that share a page cache: each reads a share, then the rest from the cache, which is
    faster than an exchange (1 GiB among four ranks: 0.7 s instead of 2.4 s, measured)."""
    with exchange.stage():
        job = _LoadJob(plan, plan.buffers())
        job.read(shares.own, headers=shares.headers, progress=progress)
    with exchange.stage():
        job.read(shares.rest, headers=(), progress=progress)
    return job.finish()


def verify(root: Root, name: str, *, progress: Progress | None = None) -> CheckpointInfo:
    """Verify every byte of a checkpoint; return its summary.

    Raises the same errors as :func:`load`.

    ``progress`` is called, from several threads, with the number of bytes of each chunk.
    """
    storage = readable(root)
    manifest = read_manifest(storage, name)
    files = MappedCheckpoint.of(storage, manifest)
    if files is not None:
        with contextlib.closing(files):
            files.verify(all_chunks(manifest), None, progress)
        return info_of(manifest)
    memory = scratch(STEP_BYTES)

    def target(tensor: TensorEntry, chunk: Chunk) -> memoryview:
        if progress is not None:
            progress(chunk.end - chunk.begin)
        return memory(tensor, chunk)

    read_chunks(storage, manifest, all_chunks(manifest), target)
    return info_of(manifest)


@dataclass(frozen=True)
class _LoadJob:
    """A plan and the buffers to fill."""

    plan: LoadPlan
    buffers: Mapping[str, TensorBuffer]

    def read(
        self,
        items: Iterable[Item],
        *,
        headers: Collection[int] | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Read and verify the needed chunks among ``items``."""
        import torch

        target, put = into_buffers(self.buffers)

        def done(tensor: TensorEntry, chunk: Chunk, data: memoryview) -> None:
            put(tensor, chunk, data)
            if progress is not None:
                progress(chunk.end - chunk.begin)

        storage, manifest = self.plan.storage, self.plan.manifest
        with torch.no_grad():
            read_chunks(storage, manifest, self.needed(items), target, headers=headers, done=done)

    def needed(self, items: Iterable[Item]) -> list[Item]:
        return [(t, c) for t, c in items if self.buffers[t.spec.name].needs(c.place)]

    def finish(self) -> LoadResult:
        """Copy verified bytes into the live tensors, unless they were read into them directly."""
        import torch

        plan = self.plan
        with torch.no_grad():
            for path in plan.match.fitting:
                buffer = self.buffers[plan.leaves[path]]
                for region, memory in live_regions(plan.live[path], path):
                    buffer.copy_out(region, memory)
        fitting = set(plan.match.fitting)

        def leaf(path: str, tensor: str) -> torch.Tensor:
            return plan.live[path] if path in fitting else self.buffers[tensor].tensor

        return LoadResult(
            state=plan.state(leaf),
            info=info_of(plan.manifest),
            unmatched=plan.unmatched(),
        )


# ----------------------------------------------------------------------------
# Find the checkpoint to resume from: the newest valid one of this training history.


@dataclass(frozen=True)
class SkippedCheckpoint:
    """A committed checkpoint that :func:`latest` did not choose, and why.

    ``is_unreadable``: the storage failed, so the checkpoint may be intact, and readable later.
    """

    name: str
    reason: str
    is_unreadable: bool = False


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
    infos = []
    for name in _names(storage):
        try:
            infos.append(info_of(read_manifest(storage, str(name))))
        except LoadError:  # latest() reports the reason
            continue
    return tuple(infos)


def latest(
    root: Root,
    *,
    lineage: Iterable[Ancestor | tuple[int, int]] | None = None,
    unusable: Mapping[str, str] | None = None,
) -> Resolution:
    """The newest valid checkpoint by (generation, step), with every byte verified.

    With ``lineage`` (:mod:`checkpoints.manifest`), checkpoints that it abandoned are never
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
        failures.get(name) or SkippedCheckpoint(str(name), off_lineage[name])
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
) -> tuple[CheckpointInfo | None, dict[CheckpointName, SkippedCheckpoint]]:
    """The first candidate that passes, and why the ones before it do not."""
    failures: dict[CheckpointName, SkippedCheckpoint] = {}
    for name in candidates:
        if (reason := refused.get(str(name))) is not None:
            failures[name] = SkippedCheckpoint(str(name), reason)
            continue
        try:
            return check(storage, str(name)), failures
        except LoadError as error:
            is_unreadable = isinstance(error, ReadFailed)
            failures[name] = SkippedCheckpoint(str(name), error.message, is_unreadable)
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
