"""Blocks of a tensor, and runs of its elements: the arithmetic of who holds and who needs what.

Pure: shapes and numbers only, no tensors.
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
class Box:
    """A block of a tensor: what a rank holds of a sharded one."""

    offset: Shape
    shape: Shape

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def within(self, outer: Box) -> Box:
        """The same block, seen from the corner of ``outer``."""
        return Box(tuple(o - p for o, p in zip(self.offset, outer.offset, strict=True)), self.shape)

    def holds(self, inner: Box) -> bool:
        return self & inner == inner

    def __and__(self, other: Box) -> Box | None:
        """What two boxes have in common, or None.

        >>> Box((0, 0), (2, 4)) & Box((1, 2), (5, 5))
        Box(offset=(1, 2), shape=(1, 2))
        """
        low = tuple(map(max, self.offset, other.offset))
        high = tuple(
            min(a + m, b + n)
            for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(h - o for h, o in zip(high, low, strict=True))
        return Box(low, shape) if all(n > 0 for n in shape) else None


Place = Span | Box


def whole(shape: Shape) -> Box:
    return Box((0,) * len(shape), shape)


def cut(box: Box, parts: int) -> tuple[Box, ...]:
    """A box in ``parts`` slices of nearly equal size; some are empty where it is too small.

    Along the first dimension if that is long enough, since such slices are contiguous.

    >>> [piece.shape for piece in cut(Box((0, 0), (17, 2)), 2)]
    [(8, 2), (9, 2)]
    """
    if parts == 1:
        return (box,)
    if not box.shape:
        return (box, *(Box((), (0,)) for _ in range(parts - 1)))
    even = [d for d, n in enumerate(box.shape) if n >= 8 * parts or (n and n % parts == 0)]
    dim = even[0] if even else box.shape.index(max(box.shape))
    edges = [box.shape[dim] * part // parts for part in range(parts + 1)]
    return tuple(_slice(box, dim, low, high - low) for low, high in pairwise(edges))


def rows(box: Box, limit: int) -> Iterator[Box]:
    """A box in blocks of at most ``limit`` elements that follow each other in row-major order."""
    if box.count <= limit or not box.shape:
        yield box
        return
    dim = next(d for d, n in enumerate(box.shape) if n > 1)
    per_row = math.prod(box.shape[dim + 1 :])
    if per_row > limit:
        for index in range(box.shape[dim]):
            yield from rows(_slice(box, dim, index, 1), limit)
        return
    step = limit // per_row
    for low in range(0, box.shape[dim], step):
        yield _slice(box, dim, low, min(step, box.shape[dim] - low))


def boxes_of(span: Span, shape: Shape) -> Iterator[tuple[Box, int]]:
    """A run of elements as boxes, each with the number of elements of the run before it.

    >>> [(box.offset, box.shape, before) for box, before in boxes_of(Span(1, 6), (3, 3))]
    [((0, 1), (1, 2), 0), ((1, 0), (1, 3), 2), ((2, 0), (1, 1), 5)]
    """
    if span.count:
        yield from _boxes_of(whole(shape), 0, span.start, span.start + span.count, 0)


def _boxes_of(box: Box, dim: int, start: int, stop: int, before: int) -> Iterator[tuple[Box, int]]:
    """``box`` is one index wide before ``dim``; start and stop count its elements."""
    if dim == len(box.shape):
        yield box, before
        return
    row = math.prod(box.shape[dim + 1 :])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # within one row
        inner = _slice(box, dim, last, 1)
        yield from _boxes_of(inner, dim + 1, start - last * row, stop - last * row, before)
        return
    if start < first * row:
        inner = _slice(box, dim, first - 1, 1)
        begin = start - (first - 1) * row
        yield from _boxes_of(inner, dim + 1, begin, row, before)
    if first < last:
        yield _slice(box, dim, first, last - first), before + first * row - start
    if last * row < stop:
        inner = _slice(box, dim, last, 1)
        yield from _boxes_of(inner, dim + 1, 0, stop - last * row, before + last * row - start)


def _slice(box: Box, dim: int, low: int, length: int) -> Box:
    offset, shape = list(box.offset), list(box.shape)
    offset[dim] += low
    shape[dim] = length
    return Box(tuple(offset), tuple(shape))
