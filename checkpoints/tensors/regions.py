"""Regions (n-dimensional blocks) and spans (flat runs of elements) of a tensor.

Pure arithmetic on shapes: no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Span:
    """``count`` elements of a tensor from ``start`` on, in row-major order."""

    start: int
    count: int


@dataclass(frozen=True)
class Region:
    """An n-dimensional block of a tensor, such as the shard that a rank holds."""

    offset: Shape
    shape: Shape

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def relative_to(self, outer: Region) -> Region:
        """The same region, with its offset relative to that of ``outer``."""
        return Region(
            tuple(o - p for o, p in zip(self.offset, outer.offset, strict=True)), self.shape
        )

    def contains(self, inner: Region) -> bool:
        return self & inner == inner

    def __and__(self, other: Region) -> Region | None:
        """The intersection of two regions, or None if it is empty.

        >>> Region((0, 0), (2, 4)) & Region((1, 2), (5, 5))
        Region(offset=(1, 2), shape=(1, 2))
        """
        low = tuple(map(max, self.offset, other.offset))
        high = tuple(
            min(a + m, b + n)
            for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(h - o for h, o in zip(high, low, strict=True))
        return Region(low, shape) if all(n > 0 for n in shape) else None


Extent = Span | Region


def full_region(shape: Shape) -> Region:
    return Region((0,) * len(shape), shape)


def split_evenly(region: Region, parts: int) -> tuple[Region, ...]:
    """Split a region into ``parts`` slices of nearly equal size; slices of a small region may be
    empty.

    Splits the first dimension if it is long enough, since such slices are contiguous.

    >>> [piece.shape for piece in split_evenly(Region((0, 0), (17, 2)), 2)]
    [(8, 2), (9, 2)]
    """
    if parts == 1:
        return (region,)
    if not region.shape:
        return (region, *(Region((), (0,)) for _ in range(parts - 1)))
    even = [d for d, n in enumerate(region.shape) if n >= 8 * parts or (n and n % parts == 0)]
    dim = even[0] if even else region.shape.index(max(region.shape))
    edges = [region.shape[dim] * part // parts for part in range(parts + 1)]
    return tuple(_slice(region, dim, low, high - low) for low, high in pairwise(edges))


def row_blocks(region: Region, limit: int) -> Iterator[Region]:
    """Split a region into blocks of at most ``limit`` elements that follow each other in row-major
    order."""
    if region.count <= limit or not region.shape:
        yield region
        return
    dim = next(d for d, n in enumerate(region.shape) if n > 1)
    per_row = math.prod(region.shape[dim + 1 :])
    if per_row > limit:
        for index in range(region.shape[dim]):
            yield from row_blocks(_slice(region, dim, index, 1), limit)
        return
    step = limit // per_row
    for low in range(0, region.shape[dim], step):
        yield _slice(region, dim, low, min(step, region.shape[dim] - low))


def regions_of(span: Span, shape: Shape) -> Iterator[tuple[Region, int]]:
    """Split a span into regions, each with the number of elements of the span that precede it.

    >>> [(region.offset, region.shape, before) for region, before in regions_of(Span(1, 6), (3, 3))]
    [((0, 1), (1, 2), 0), ((1, 0), (1, 3), 2), ((2, 0), (1, 1), 5)]
    """
    if span.count:
        yield from _regions_of(full_region(shape), 0, span.start, span.start + span.count, 0)


def _regions_of(
    region: Region, dim: int, start: int, stop: int, before: int
) -> Iterator[tuple[Region, int]]:
    """``region`` has length 1 in the dimensions before ``dim``; start and stop count its
    elements."""
    if dim == len(region.shape):
        yield region, before
        return
    row = math.prod(region.shape[dim + 1 :])
    first, last = -(-start // row), stop // row  # complete rows
    if first > last:  # within one row
        inner = _slice(region, dim, last, 1)
        yield from _regions_of(inner, dim + 1, start - last * row, stop - last * row, before)
        return
    if start < first * row:
        inner = _slice(region, dim, first - 1, 1)
        begin = start - (first - 1) * row
        yield from _regions_of(inner, dim + 1, begin, row, before)
    if first < last:
        yield _slice(region, dim, first, last - first), before + first * row - start
    if last * row < stop:
        inner = _slice(region, dim, last, 1)
        yield from _regions_of(inner, dim + 1, 0, stop - last * row, before + last * row - start)


def _slice(region: Region, dim: int, low: int, length: int) -> Region:
    offset, shape = list(region.offset), list(region.shape)
    offset[dim] += low
    shape[dim] = length
    return Region(tuple(offset), tuple(shape))
