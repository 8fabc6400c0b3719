"""Ranks that load together: each reads a share, they exchange it, and all fail as one.

Only collectives of the group that the caller gave are used, in one order on every rank: what is
exchanged follows from the manifest, which they agree on first. Reports travel as JSON: nothing
is unpickled. A rank that dies makes the group fail, or its timeout end, on the others.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from checkpoints import errors
from checkpoints.errors import CorruptCheckpoint, LoadError, StateMismatch, TornRead
from checkpoints.loading.buffers import TensorBuffer
from checkpoints.loading.reader import Item
from checkpoints.tensors.dtypes import BY_NAME

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_ALONE_BYTES = 1 << 20  # from here on, a chunk travels from and to where it lies
_PACKED_BYTES = 16 << 20
_IN_FLIGHT = 4  # messages at once: it bounds the memory for packed ones
_ALIGNMENT = 64
_SIZE_BYTES = 8
_SHORT_BYTES = 1024  # what nearly every report fits into


def shares_of(items: Sequence[Item], size: int) -> tuple[tuple[Item, ...], ...]:
    """Items in runs of about equal bytes, one for each rank."""
    total = sum(_size(item) for item in items)
    shares: list[list[Item]] = [[] for _ in range(size)]
    begin = 0
    for item in items:
        middle = begin + _size(item) // 2
        shares[min(middle * size // max(total, 1), size - 1)].append(item)
        begin += _size(item)
    return tuple(map(tuple, shares))


class Stage:
    """What this rank tells the others at the end of a stage, and then what all have said."""

    def __init__(self) -> None:
        self.fact = ""
        self.files: str | None = None
        self.share_page_cache = False  # known after the stage

    def must_agree(self, fact: str) -> None:
        """All ranks must say the same here."""
        self.fact = fact

    def reads(self, files: str | None) -> None:
        """Which files these are, among all that ranks may mean; None where that is not known."""
        self.files = files


class Exchange:
    """A process group's ranks, loading one checkpoint."""

    def __init__(self, group: ProcessGroup) -> None:
        import torch.distributed as dist

        self._dist = dist
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        backend = str(dist.get_backend(group))
        self.tensors = "The tensors are as they were."  # what a failure may say about them
        only_gpu = "nccl" in backend and "gloo" not in backend
        self._device = torch.device("cuda" if only_gpu else "cpu")

    @contextmanager
    def stage(self) -> Iterator[Stage]:
        """A stage that all ranks complete, or none: a failure of one is raised on all."""
        here, failure = Stage(), None
        try:
            yield here
        except Exception as error:  # noqa: BLE001  told to all, and raised below
            failure = error
        mine = {"failure": failure and _as_json(failure), "fact": here.fact, "files": here.files}
        reports = self._tell(mine)
        for rank, report in enumerate(reports):
            if report["failure"] is None:
                continue
            if rank == self.rank and failure is not None:
                raise failure
            raise _from_json(report["failure"], rank) from failure
        for rank, report in enumerate(reports):
            if report["fact"] != reports[0]["fact"]:
                raise LoadError(
                    f"rank {rank} loads another checkpoint, or into another form of state, "
                    "than rank 0",
                    hint="Tell all ranks one name; give all of them the same sharding.",
                )
        files = {report["files"] for report in reports}
        here.share_page_cache = len(files) == 1 and None not in files

    def all_gather(
        self, shares: Sequence[Sequence[Item]], buffers: Mapping[str, TensorBuffer]
    ) -> None:
        """Give what this rank has read to all others, and take what they have.

        By broadcasts: gloo's all_gather moved 0.2 GB/s where its broadcast moved 1.2 [measured].
        """
        messages = [list(_messages(share)) for share in shares]
        turns = itertools.zip_longest(*messages, fillvalue=())
        flow = [(rank, m) for turn in turns for rank, m in enumerate(turn) if m]
        for first in range(0, len(flow), _IN_FLIGHT):
            now = flow[first : first + _IN_FLIGHT]
            with self._told():
                sent = [(*of, *self._start(*of, buffers)) for of in now]
                for rank, message, buffer, work in sent:
                    work.wait()
                    if rank != self.rank:
                        self._unpack(message, buffer, buffers)
        with self.stage():  # nobody touches a live tensor before everybody has all
            pass

    def _start(
        self, rank: int, message: Sequence[Item], buffers: Mapping[str, TensorBuffer]
    ) -> tuple[torch.Tensor, Any]:
        """Broadcast a message of ``rank``: where it lies, if it is one piece, else packed."""
        buffer = self._in_place(message, buffers)
        if buffer is None:
            buffer = torch.empty(sum(map(_room, message)), dtype=torch.uint8)
            if rank == self.rank:
                for (tensor, chunk), place in _placed(message):
                    data = buffers[tensor.spec.name].get(chunk.place).view(torch.uint8)
                    buffer[place : place + data.numel()] = data
        buffer = buffer.to(self._device)
        return buffer, self._dist.broadcast(
            buffer, group=self._group, group_src=rank, async_op=True
        )

    def _unpack(
        self, message: Sequence[Item], buffer: torch.Tensor, buffers: Mapping[str, TensorBuffer]
    ) -> None:
        room = self._in_place(message, buffers)
        if room is not None:
            if room.data_ptr() != buffer.data_ptr():
                room.copy_(buffer)
            return
        here = buffer.cpu()
        for (tensor, chunk), place in _placed(message):
            data = here[place : place + chunk.end - chunk.begin]
            spare = buffers[tensor.spec.name]
            spare.put(chunk.place, data.view(BY_NAME[tensor.spec.dtype].torch))

    def _in_place(
        self, message: Sequence[Item], buffers: Mapping[str, TensorBuffer]
    ) -> torch.Tensor | None:
        """The same answer on all ranks: whole tensors lie alike everywhere."""
        if len(message) != 1:
            return None
        tensor, chunk = message[0]
        room = buffers[tensor.spec.name].room(chunk.place)
        return None if room is None else room.view(torch.uint8)

    def _tell(self, report: Mapping[str, object]) -> list[dict[str, Any]]:
        """Every rank's report: in one collective, unless there is one that is long."""
        text = json.dumps(report).encode()
        size = len(text).to_bytes(_SIZE_BYTES, "little")
        told = self._gathered((size + text)[:_SHORT_BYTES], _SHORT_BYTES)
        longest = max(int.from_bytes(data[:_SIZE_BYTES], "little") for data in told)
        if _SIZE_BYTES + longest > _SHORT_BYTES:
            told = self._gathered(size + text, _SIZE_BYTES + longest)
        return [json.loads(data[_SIZE_BYTES:]) for data in told]

    def _gathered(self, data: bytes, size: int) -> list[bytes]:
        """Every rank's bytes, filled up with spaces to ``size``."""
        padded = torch.frombuffer(bytearray(data.ljust(size)), dtype=torch.uint8)
        taken = torch.empty((self.size, size), dtype=torch.uint8, device=self._device)
        with self._told():
            self._dist.all_gather(list(taken), padded.to(self._device), group=self._group)
        return [row.numpy().tobytes() for row in taken.cpu()]

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise LoadError(
                f"the process group failed while loading: {error}",
                hint=f"{self.tensors} Make a new group, and load again.",
            ) from error


def _messages(share: Sequence[Item]) -> Iterator[list[Item]]:
    """Large chunks by themselves, small ones together."""
    packed: list[Item] = []
    size = 0
    for item in share:
        if _size(item) >= _ALONE_BYTES:
            yield [item]
            continue
        if packed and size + _room(item) > _PACKED_BYTES:
            yield packed
            packed, size = [], 0
        packed.append(item)
        size += _room(item)
    if packed:
        yield packed


def _placed(message: Sequence[Item]) -> Iterator[tuple[Item, int]]:
    place = 0
    for item in message:
        yield item, place
        place += _room(item)


def _size(item: Item) -> int:
    return item[1].end - item[1].begin


def _room(item: Item) -> int:
    """Aligned: the bytes are looked at as elements where they lie."""
    return -(-_size(item) // _ALIGNMENT) * _ALIGNMENT


def _as_json(error: Exception) -> dict[str, Any]:
    found: dict[str, Any] = {"type": type(error).__name__, "message": repr(error), "hint": ""}
    if isinstance(error, LoadError):
        found.update(message=error.message, hint=error.hint)
    if isinstance(error, CorruptCheckpoint):
        found.update(reason=error.reason, file=error.file, tensor=error.tensor)
    if isinstance(error, StateMismatch):
        found.update(missing=error.missing, extra=error.extra, mismatched=error.mismatched)
    return found


def _from_json(found: Mapping[str, Any], rank: int) -> LoadError:
    """The same error as on the other rank, and which rank that was."""
    kind = getattr(errors, found["type"], LoadError)
    error: LoadError
    if kind is CorruptCheckpoint:
        error = CorruptCheckpoint(found["reason"], file=found["file"], tensor=found["tensor"])
    elif kind is StateMismatch:
        lists = {key: tuple(found[key]) for key in ("missing", "extra", "mismatched")}
        error = StateMismatch("the checkpoint", **lists)
    elif kind is TornRead:
        error = TornRead("the checkpoint")
    else:
        known = isinstance(kind, type) and issubclass(kind, LoadError)
        error = (kind if known else LoadError)(found["message"], hint=found["hint"])
    error.message = f"on rank {rank}: {found['message']}"
    return error
