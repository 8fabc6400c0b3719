"""Which rank writes what: a pure function of (tensors, world size, rank), without communication.

Replicated tensors are concatenated, widest elements first, and cut into W pieces of equal bytes,
rounded up to an element. A rank's share of a tensor is a *span*: a run of elements in row-major
order. For sharded tensors, a rank writes *regions* that it holds
(:mod:`checkpoints.tensors.layout`). In a file, wide elements come first, which keeps every piece
aligned.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from checkpoints.errors import ArgumentError
from checkpoints.tensors.dtypes import BY_NAME
from checkpoints.tensors.layout import Layout, written_regions
from checkpoints.tensors.regions import Extent, Span, row_blocks

# Bytes per hash: the unit that a reader must read to verify any part of it.
CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class TensorSpec:
    """A global tensor, with the same description on every rank; replicated if it has no layout."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    layout: Layout | None = field(default=None, compare=False)

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def element_bytes(self) -> int:
        return BY_NAME[self.dtype].size_bytes

    @property
    def size_bytes(self) -> int:
        return self.count * self.element_bytes


def share_of(
    specs: Sequence[TensorSpec], world_size: int, rank: int, section: Sequence[int] | None = None
) -> tuple[tuple[TensorSpec, Extent], ...]:
    """The pieces that ``rank`` writes, in file order. ``section``: the ranks that have these
    tensors, in order; None: all.

    >>> specs = [TensorSpec("a", "F32", (3,)), TensorSpec("b", "U8", (4,))]
    >>> [(s.name, span.start, span.count) for s, span in share_of(specs, 2, 0)]
    [('a', 0, 2)]
    >>> [(s.name, span.start, span.count) for s, span in share_of(specs, 2, 1)]
    [('a', 2, 1), ('b', 0, 4)]
    """
    ordered = sorted(specs, key=lambda spec: -spec.element_bytes)
    total = sum(spec.size_bytes for spec in ordered if spec.layout is None)
    among = range(world_size) if section is None else section
    place = among.index(rank)
    low, high = total * place // len(among), total * (place + 1) // len(among)
    pieces: list[tuple[TensorSpec, Extent]] = []
    begin = 0
    for turn, spec in enumerate(ordered):
        if spec.layout is not None and spec.count:
            _check_mesh(spec, spec.layout, world_size)
            pieces += [
                (spec, region) for region in written_regions(spec.layout, spec.shape, rank, turn)
            ]
            continue
        start, stop = (_element_at(cut - begin, spec) for cut in (low, high))
        # Empty tensors have no bytes, but safetensors readers look up their names.
        if stop > start or (spec.count == 0 and place == 0):
            pieces.append((spec, Span(start, stop - start)))
        begin += spec.size_bytes
    return tuple(pieces)


def _check_mesh(spec: TensorSpec, layout: Layout, world_size: int) -> None:
    if max(layout.ranks) >= world_size:
        raise ArgumentError(
            f"tensor {spec.name!r} is sharded over rank {max(layout.ranks)}, "
            f"but world_size is {world_size}",
            hint="Save with the rank and world size of torch.distributed.",
        )


def _element_at(offset_bytes: int, spec: TensorSpec) -> int:
    """The first element at or after a byte offset; equal for the ranks on both sides of a cut."""
    return min(max(-(-offset_bytes // spec.element_bytes), 0), spec.count)


def chunks_of(place: Extent, element_bytes: int) -> Iterator[Extent]:
    """Split a piece into chunks of at most :data:`CHUNK_BYTES`, in order; each has its own hash."""
    per_chunk = max(1, CHUNK_BYTES // element_bytes)
    if not isinstance(place, Span):
        yield from row_blocks(place, per_chunk)
        return
    stop = place.start + place.count
    for start in range(place.start, stop, per_chunk):
        yield Span(start, min(per_chunk, stop - start))
