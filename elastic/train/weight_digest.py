"""Digests of a rotating part of the weights, which ranks compare in every step.

Reading all weights in every step would slow training down. So each step reads one of several parts,
and all of them within as many steps that reduce gradients. The digest is summed over the ranks with
the control flags of the first gradient bucket (:mod:`elastic.train.order`): bit by bit, each as the
numbers of ranks that have it set and not set. A bit that differs leaves both above 0, at any number
of ranks and in any floating dtype, because sums of positive numbers do not round to 0.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash

from elastic.train.sharding import local_value

BITS = 16  # a difference stays unnoticed in one of 65,536 comparisons, until the next one
_PARTS = 64  # unless these would be small: reading 1/64 of the weights is about 0.5 % of an update
_SMALL_BYTES = 1 << 16
_TENSORS = 8  # per part: each costs 2 µs
_CHUNK_BYTES = 1 << 24  # are read at once, with three times as much temporary memory
_ROW = 1 << 16  # integers with factors of their own
_ODD = 0x1E3779B97F4A7C15  # mixes all bits into the highest ones, which are compared

Weights = Mapping[str, Callable[[], Sequence[torch.Tensor]]]
"""The current weights, by owner's name: with the same names and shapes on the compared ranks."""


@dataclass(frozen=True)
class _Piece:
    """Elements of a tensor."""

    owner: str
    index: int
    begin: int
    end: int


_Part = list[list[_Piece]]
"""What is read in a step: chunks of pieces."""
_Chunks = Sequence[Sequence[torch.Tensor]]
"""The bytes of these pieces."""


class WeightDigest:
    """The digests of the weights at the beginning of each step from ``first`` on: of one part until
    ranks have compared it (steps of an accumulation may not), then of the next one.

    ``same_after``: a step after which ranks had the same weights, bit by bit; None if they may
    differ by rounding.
    """

    def __init__(self, weights: Weights, *, same_after: int | None, first: int) -> None:
        self._weights = weights
        self._same_after = same_after
        self._first = first
        self._parts = _divide(weights)
        # Whether the part that was read last has another digest now.
        self.has_part_changed: Callable[[], bool] = lambda: False
        self._compared = 0  # digests that ranks have compared
        self._steps: deque[int] = deque(maxlen=len(self._parts))  # of the last ones

    def bits(self, step: int) -> torch.Tensor | None:
        """The digest of the part for this step: :data:`BITS` ones and zeros, then their
        complements. None if nothing is to be compared."""
        if step < self._first or not self._parts:
            return None
        part = self._parts[self._compared % len(self._parts)]
        read = self._bits(part)
        self.has_part_changed = lambda: not torch.equal(self._bits(part), read)
        return read

    def _bits(self, part: _Part) -> torch.Tensor:
        with torch.no_grad():
            chunks = [[self._values(piece) for piece in chunk] for chunk in part]
            if all(values.device.type == "cpu" for chunk in chunks for values in chunk):
                return _bits_on_host(chunks)
            return _bits_on_device(chunks)

    def compared(self, step: int) -> None:
        """Record that ranks have compared the digest of ``step``."""
        self._compared += 1
        self._steps.append(step)

    def changed_in(self, step: int) -> range | None:
        """The steps of which one has changed weights whose digests differ in ``step``, but did not
        before. None: unknown."""
        if self._same_after is None:
            return None
        are_all_read = self._steps and len(self._steps) == len(self._parts)
        return range(self._steps[0] if are_all_read else self._same_after + 1, step)

    def _values(self, piece: _Piece) -> torch.Tensor:
        tensor = self._weights[piece.owner]()[piece.index]
        return _flat(tensor)[piece.begin : piece.end].view(torch.uint8)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    local = local_value(tensor).detach()
    return (torch.view_as_real(local) if local.is_complex() else local).reshape(-1)


def _divide(weights: Weights) -> list[_Part]:
    """The parts, of about equal size, each of few tensors."""
    size_bytes = sum(tensor.nbytes for _, _, tensor in _tensors(weights))
    limit_bytes = max(_SMALL_BYTES, -(-size_bytes // _PARTS))
    parts: list[_Part] = []
    room_bytes = tensors = chunk_bytes = 0
    for owner, index, tensor in _tensors(weights):
        begin, scale = 0, 2 if tensor.is_complex() else 1
        count, item_bytes = tensor.numel() * scale, tensor.element_size() // scale
        while begin < count:
            if room_bytes < item_bytes or not tensors:
                parts.append([])
                room_bytes, tensors, chunk_bytes = limit_bytes, _TENSORS, 0
            if chunk_bytes < item_bytes:
                parts[-1].append([])
                chunk_bytes = _CHUNK_BYTES
            end = min(count, begin + min(room_bytes, chunk_bytes) // item_bytes)
            parts[-1][-1].append(_Piece(owner, index, begin, end))
            room_bytes -= (end - begin) * item_bytes
            chunk_bytes -= (end - begin) * item_bytes
            begin = end
        tensors -= 1
    return parts


def _tensors(weights: Weights) -> Iterator[tuple[str, int, torch.Tensor]]:
    for owner in sorted(weights):
        for index, tensor in enumerate(weights[owner]()):
            if _is_read(local := local_value(tensor)):
                yield owner, index, local


def _is_read(local: torch.Tensor) -> bool:
    return local.numel() > 0 and local.layout is torch.strided


def _bits_on_host(chunks: _Chunks) -> torch.Tensor:
    """A tenth of the time that torch's operations take there."""
    read = xxhash.xxh3_64()
    for chunk in chunks:
        for values in chunk:
            read.update(values.numpy().data)
    digest = read.intdigest()
    is_set = [digest >> shift & 1 for shift in range(BITS)]
    return torch.tensor([*is_set, *(1 - bit for bit in is_set)], device="cpu")


def _bits_on_device(chunks: _Chunks) -> torch.Tensor:
    """Without waiting for the device."""
    total = torch.zeros((), dtype=torch.int64, device=chunks[0][0].device)
    for chunk in chunks:
        total = total * _ODD + _digest(chunk).to(total.device)
    is_set = (total * _ODD >> _shifts(total.device)) & 1
    return torch.cat([is_set, 1 - is_set])


def _digest(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """A number that depends on every bit and its position.

    The sum of 32-bit integers times odd factors, modulo 2**64. With 64-bit integers, the highest
    bit of every product would be that of the integer: two changed signs would cancel out.
    """
    read = torch.cat([v.to(values[0].device) for v in values]) if len(values) > 1 else values[0]
    if missing := -read.numel() % 4:
        read = torch.cat([read, read.new_zeros(missing)])
    elif read.storage_offset() % 4:
        read = read.clone()  # of an unaligned view
    integers = read.view(torch.int32)
    count = integers.numel()
    factors = _factors(integers.device)
    if count <= _ROW:
        return (integers * factors[:count]).sum()
    padded = torch.nn.functional.pad(integers, (0, -count % _ROW)).view(-1, _ROW)
    rows = (padded * factors).sum(1)
    return (rows * factors[-rows.numel() :]).sum()


@functools.lru_cache(maxsize=8)
def _factors(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(0, 1 << 62, (_ROW,), generator=generator, device="cpu")
    return (drawn | 1).to(device)


@functools.lru_cache(maxsize=8)
def _shifts(device: torch.device) -> torch.Tensor:
    return torch.arange(64 - BITS, 64, device=device)
