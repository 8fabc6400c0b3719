"""How a tensor is sharded over ranks, and which of its elements each rank writes.

A layout is the numeric form of a DTensor's mesh and placements. Every rank has the complete layout,
so no communication is needed. Where several ranks hold the same region (replicated dimensions of
the mesh, as in HSDP), each writes an equal slice of it.

The order of splits is torch's (``torch/distributed/tensor/_utils.py``): from the first dimension
of the mesh to the last, each into pieces of ``ceil(length / size)``, like torch.chunk. A *strided*
split (FSDP over tensor parallelism) first makes ``factor`` pieces, splits each, and gives a rank
its share of every piece.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

from checkpoints.tensors.regions import Region, Shape, split_evenly

Interval = tuple[int, int]  # start, length


@dataclass(frozen=True)
class Split:
    """A mesh dimension that shards dimension ``dim`` of the tensor."""

    dim: int
    factor: int = 1


@dataclass(frozen=True)
class Layout:
    """The ranks of a mesh in row-major order; per mesh dimension a split, or None if replicated."""

    mesh_shape: Shape
    ranks: tuple[int, ...]
    splits: tuple[Split | None, ...]

    def coordinate(self, rank: int) -> Shape | None:
        """The coordinate of a rank in the mesh; None if it is not part of it."""
        if rank not in self.ranks:
            return None
        index, coordinate = self.ranks.index(rank), []
        for size in reversed(self.mesh_shape):
            index, at = divmod(index, size)
            coordinate.append(at)
        return tuple(reversed(coordinate))


@dataclass(frozen=True)
class LocalShard:
    """A region of the global tensor, and its offset in the local tensor of the rank that holds
    it."""

    region: Region
    local_offset: Shape


@functools.lru_cache(maxsize=65536)
def local_shards(layout: Layout, shape: Shape, coordinate: Shape) -> tuple[LocalShard, ...]:
    """The shards of the rank at ``coordinate``: usually one; none if its shard is empty.

    >>> rows = Layout((2,), (0, 1), (Split(0),))
    >>> local_shards(rows, (5, 4), (1,))
    (LocalShard(region=Region(offset=(3, 0), shape=(2, 4)), local_offset=(0, 0)),)
    """
    kept: list[list[Interval]] = [[(0, n)] for n in shape]
    for split, size, at in zip(layout.splits, layout.mesh_shape, coordinate, strict=True):
        if split is not None:
            kept[split.dim] = _share_of(kept[split.dim], split.factor, size, at)
    by_dim = [list(_merged(intervals)) for intervals in kept]
    return tuple(
        LocalShard(
            Region(tuple(start for start, _, _ in block), tuple(length for _, length, _ in block)),
            tuple(local for _, _, local in block),
        )
        for block in itertools.product(*by_dim)
    )


@functools.lru_cache(maxsize=65536)
def local_shape(layout: Layout, shape: Shape, coordinate: Shape) -> Shape:
    """The shape of the local tensor of the rank at ``coordinate``.

    >>> local_shape(Layout((4,), (0, 1, 2, 3), (Split(0),)), (5, 4), (3,))
    (0, 4)
    """
    lengths = list(shape)
    for dim in range(len(shape)):
        kept = [(0, shape[dim])]
        for split, size, at in zip(layout.splits, layout.mesh_shape, coordinate, strict=True):
            if split is not None and split.dim == dim:
                kept = _share_of(kept, split.factor, size, at)
        lengths[dim] = sum(length for _, length in kept)
    return tuple(lengths)


@functools.lru_cache(maxsize=65536)
def written_regions(layout: Layout, shape: Shape, rank: int, turn: int) -> tuple[Region, ...]:
    """The regions that ``rank`` writes. ``turn`` rotates which rank writes a region that is too
    small to be sliced."""
    coordinate = layout.coordinate(rank)
    if coordinate is None:
        return ()
    copies, mine = 1, 0
    for split, size, at in zip(layout.splits, layout.mesh_shape, coordinate, strict=True):
        if split is None:
            copies, mine = copies * size, mine * size + at
    slices = (
        split_evenly(r.region, copies)[(mine + turn) % copies]
        for r in local_shards(layout, shape, coordinate)
    )
    return tuple(region for region in slices if region.count)


def _share_of(kept: list[Interval], factor: int, size: int, at: int) -> list[Interval]:
    shares = []
    for piece in _chunks(kept, factor):
        shares += _chunks(piece, size)[at]
    return shares


def _chunks(kept: list[Interval], count: int) -> list[list[Interval]]:
    total = sum(length for _, length in kept)
    step = -(-total // count)
    return [_window(kept, step * i, min(step * (i + 1), total)) for i in range(count)]


def _window(kept: list[Interval], low: int, high: int) -> list[Interval]:
    """The part of a list of intervals from its ``low``-th element to its ``high``-th."""
    found, before = [], 0
    for start, length in kept:
        first, last = max(low - before, 0), min(high - before, length)
        if first < last:
            found.append((start + first, last - first))
        before += length
    return found


def _merged(kept: list[Interval]) -> list[tuple[int, int, int]]:
    """(start, length, start in the local tensor), with adjacent intervals merged."""
    placed: list[tuple[int, int, int]] = []
    local = 0
    for start, length in kept:
        if placed and placed[-1][0] + placed[-1][1] == start:
            placed[-1] = (placed[-1][0], placed[-1][1] + length, placed[-1][2])
        else:
            placed.append((start, length, local))
        local += length
    return placed
