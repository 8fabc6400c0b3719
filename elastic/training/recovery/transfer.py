"""Transfers state from one rank to others: JSON and raw bytes, never pickle.

Into spare memory, by default: the receiver is unchanged until everything has arrived with a correct
hash, so a source that dies in the middle has no effect on receivers. A receiver that has nothing
to lose can name memory of its own (``Room``), which saves a copy, and on a device the space for it.
"""

from __future__ import annotations

import ctypes
import json
import mmap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import xxhash

from elastic.errors import TrainingError
from elastic.process_group import (
    RankGroup,
    broadcast_bytes,
    broadcast_json,
    complete,
    control_device,
    world_group,
)

# A state is sent in at least a few chunks, so that one is transferred while another is hashed and
# copied, and chunks are small enough that three of them need little memory.
CHUNKS, SHORTEST_CHUNK_BYTES, LONGEST_CHUNK_BYTES = 8, 1 << 20, 32 << 20
# From this size on, two copies of a tensor cost more than an additional collective.
IN_PLACE_BYTES = 4 << 20
HUGE_PAGE_BYTES = 2 << 20

Tensors = dict[str, torch.Tensor]
Specs: TypeAlias = Mapping[str, list[Any]]
Room: TypeAlias = Callable[[Any, Specs], Tensors]
"""Called on a receiver with the source's JSON value and specs, before anything is sent: tensors to
receive into. From then on they hold garbage, until :func:`transfer` has returned. Must not raise:
other ranks are in the transfer."""


def broadcast_blob(
    node: Any, tensors: Mapping[str, torch.Tensor], source: int, group: RankGroup | None = None
) -> tuple[Any, Tensors]:
    """Give every rank the JSON value and the small tensors of ``source``, on the CPU.

    Other ranks may pass anything. For state that fits into one packet: everything is one buffer.
    ``group``: by default the world, here and below; ranks are numbered in it.
    """
    group = group or world_group()
    if group.size == 1:
        return node, dict(tensors)
    is_source = group.rank == source
    data = _blob(node, tensors) if is_source else b""
    told = broadcast_bytes(data, source, group)
    if is_source:
        return node, dict(tensors)
    return _parse_blob(torch.frombuffer(bytearray(told), dtype=torch.uint8))


def _blob(node: Any, tensors: Mapping[str, torch.Tensor]) -> bytes:
    kept = {name: _bytes(tensor) for name, tensor in tensors.items()}
    head = json.dumps({"node": node, "specs": specs_of(tensors)}).encode()
    parts = [len(head).to_bytes(8, "little"), head]
    return b"".join([*parts, *(bytes(flat.cpu().numpy()) for flat in kept.values())])


def _parse_blob(buffer: torch.Tensor) -> tuple[Any, Tensors]:
    length = int.from_bytes(bytes(buffer[:8].tolist()), "little")
    head = json.loads(bytes(buffer[8 : 8 + length].numpy()))
    at, tensors = 8 + length, {}
    for name, spec in head["specs"].items():
        spare = _spare(spec, torch.device("cpu"))
        flat = _bytes(spare)
        flat.copy_(buffer[at : at + flat.numel()])
        at += flat.numel()
        tensors[name] = spare
    return head["node"], tensors


def specs_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Name to ``[dtype, shape, device type]``, for the receiver's buffers."""
    return {
        name: [str(t.dtype).removeprefix("torch."), list(t.shape), t.device.type]
        for name, t in tensors.items()
    }


def transfer(
    node: Any,
    tensors: Mapping[str, torch.Tensor],
    *,
    source: int,
    receivers: tuple[int, ...],
    device: torch.device,
    group: RankGroup | None = None,
    room: Room | None = None,
) -> tuple[Any, Tensors] | None:
    """The source's JSON value and tensors for each of ``receivers``: in ``room`` where that has
    tensors like the source's, else in spare memory.

    Every rank calls it and takes part in the collectives; those that neither send nor receive
    keep nothing and get None. Raises TrainingError if a hash is wrong.
    """
    group = group or world_group()
    rank = group.rank
    concerned = rank == source or rank in receivers
    plan = broadcast_json(
        {"node": node, "specs": specs_of(tensors)} if rank == source else None, source, group
    )
    kept: Tensors = {}
    if rank == source:
        kept = {name: tensor.detach() for name, tensor in tensors.items()}
    elif concerned:
        kept = _memory_for(plan, device, room)
    wire = group.wire(device)
    sizes = {name: _count_bytes(spec) for name, spec in plan["specs"].items()}
    flat = {name: _bytes(tensor) for name, tensor in kept.items()}
    # One receiver is sent to directly. Several receive a broadcast, in
    # which receivers pass it on.
    is_on_host = wire.type == "cpu" and not group.semantics(wire).is_on_stream
    only = receivers[0] if len(receivers) == 1 and is_on_host else None
    digest = ChunkedBroadcast(flat, sizes, source, only, wire, group).run()
    check_hashes(digest, source, concerned, group)
    return (plan["node"], kept) if rank in receivers else None


Piece = tuple[str, int, int]
"""Bytes ``start`` to ``stop`` of the tensor of that name."""


def _chunks(sizes: Mapping[str, int], longest: int) -> Iterator[list[Piece]]:
    """All tensors' bytes, divided so that small ones share a chunk and no chunk is too long.

    A large tensor does not share chunks: they can be sent from its own memory.
    """
    pieces: list[Piece] = []
    room = longest
    for name, size in sizes.items():
        if size >= min(IN_PLACE_BYTES, longest):
            yield from ([(name, at, min(size, at + longest))] for at in range(0, size, longest))
            continue
        if size > room:
            yield pieces
            pieces, room = [], longest
        if size:
            pieces.append((name, 0, size))
            room -= size
    if pieces:
        yield pieces


class ChunkedBroadcast:
    """Transfer all chunks from the source: one is sent while the previous one is copied.

    ``flat`` holds the bytes of each tensor, to read or to fill; it is empty on a rank that is not
    involved. ``only``: the receiving rank, if there is only one.
    """

    def __init__(
        self,
        flat: Tensors,
        sizes: Mapping[str, int],
        source: int,
        only: int | None,
        wire: torch.device,
        group: RankGroup,
    ) -> None:
        self._group = group
        self._flat = flat
        self._sizes = sizes
        self._source = source
        self._only = only
        self._wire = wire
        self._semantics = group.semantics(wire)
        self._is_source = group.rank == source
        self._digest = xxhash.xxh3_64()

    def run(self) -> str:
        """Transfer all chunks; returns the hash of the data."""
        total = sum(self._sizes.values())
        longest = min(max(total // CHUNKS, SHORTEST_CHUNK_BYTES), LONGEST_CHUNK_BYTES)
        buffers = [torch.empty(min(longest, total), dtype=torch.uint8) for _ in range(2)]
        before: SentChunk | None = None
        for number, pieces in enumerate(_chunks(self._sizes, longest)):
            sent = self.send_chunk(pieces, buffers[number % 2])
            if before is not None:
                self.finish_chunk(before)
            before = sent
        if before is not None:
            self.finish_chunk(before)
        return str(self._digest.hexdigest())

    def send_chunk(self, pieces: list[Piece], buffer: torch.Tensor) -> SentChunk:
        """Begin to broadcast a chunk of these pieces, from the memory of their tensor to that of
        the receiver's, or through ``buffer``."""
        chunk = self._in_place(pieces)
        if chunk is None:
            chunk = buffer[: sum(stop - start for _, start, stop in pieces)]
            if self._is_source:
                for place, (name, start, stop) in _places(pieces):
                    chunk[place] = self._flat[name][start:stop]
        moved = chunk.to(self._wire)
        if self._only is None:
            work = self._group.broadcast(moved, self._source)
        else:
            work = self._group.send_one(moved, self._source, self._only)
        if work is not None and not self._semantics.is_on_stream:
            self._group.works.begin(work)  # not waited for if the previous chunk fails
        return pieces, moved, work

    def _in_place(self, pieces: list[Piece]) -> torch.Tensor | None:
        """The part of a tensor that equals the chunk, if it can be sent from memory directly."""
        name, start, stop = pieces[0]
        flat = self._flat.get(name)
        if len(pieces) > 1 or flat is None or {flat.device, self._wire} != {torch.device("cpu")}:
            return None
        return flat[start:stop]

    def finish_chunk(self, sent: SentChunk) -> None:
        """Wait for a chunk, hash it, and copy it to its destination on a receiver."""
        pieces, moved, work = sent
        self._wait(work)
        if not self._flat:
            return
        chunk = moved.cpu()
        self._digest.update(chunk.numpy().data)
        if self._is_source or self._in_place(pieces) is not None:
            return
        for place, (name, start, stop) in _places(pieces):
            flat = self._flat[name]
            flat[start:stop] = chunk[place].to(flat.device)

    def _wait(self, work: dist.Work | None) -> None:
        if work is None or self._semantics.is_on_stream:
            complete(work, self._wire, self._group)
        else:
            self._group.works.finish_one(work)
            self._semantics.synchronize(self._wire)


SentChunk = tuple[list[Piece], torch.Tensor, dist.Work | None]


def _places(pieces: list[Piece]) -> Iterator[tuple[slice, Piece]]:
    """The offset of each piece in its chunk."""
    at = 0
    for piece in pieces:
        _, start, stop = piece
        yield slice(at, at + stop - start), piece
        at += stop - start


def check_hashes(mine: str, source: int, concerned: bool, group: RankGroup) -> None:
    """Compare the receivers' hashes with the source's."""
    device = control_device(group)
    sent = torch.tensor([int(mine, 16) & (2**62 - 1)], dtype=torch.int64, device=device)
    got = sent.clone()
    complete(group.broadcast(got, source), device, group)
    if concerned and int(got.item()) != int(sent.item()):
        raise TrainingError(
            f"the state sent by rank {source} was corrupted in transfer (hash {int(sent):x}, "
            f"expected {int(got):x}), and is not used",
            hint="check for hardware errors on the network between the nodes",
        )


def _memory_for(plan: Mapping[str, Any], device: torch.device, room: Room | None) -> Tensors:
    specs: Specs = plan["specs"]
    own = room(plan["node"], specs) if room is not None else {}
    alike = specs_of(own)
    return {
        name: own[name].detach()
        if alike.get(name) == spec and _is_flat(own[name])
        else _spare(spec, device)
        for name, spec in specs.items()
    }


def _is_flat(tensor: torch.Tensor) -> bool:
    """Whether :func:`_bytes` is a view of all of it."""
    return tensor.is_contiguous() and _bytes(tensor).data_ptr() == tensor.data_ptr()


def _spare(spec: list[Any], device: torch.device) -> torch.Tensor:
    on = device if spec[2] == device.type else torch.device("cpu")
    spare = torch.empty(spec[1], dtype=getattr(torch, spec[0]), device=on)
    if on.type == "cpu":
        _use_huge_pages(spare)
    return spare


def _use_huge_pages(tensor: torch.Tensor) -> None:
    """Have the kernel map and zero new memory 2 MiB at a time, where it can.

    4 KiB at a time takes longer than everything else that a receiver does: of 195 MiB, 0.45 s
    instead of 0.14 s with two receivers on two cores [measured].
    """
    first = -(-tensor.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
    size = (end - first) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if size > 0:  # a kernel without huge pages refuses, and the memory is as it was
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)


def _count_bytes(spec: list[Any]) -> int:
    count = torch.empty(0, dtype=getattr(torch, spec[0])).element_size()
    for length in spec[1]:
        count *= length
    return count


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as flat bytes: a view where its memory is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() == 1 and flat.stride(0) != 1:
        flat = flat.clone()
    return flat.view(torch.uint8)
