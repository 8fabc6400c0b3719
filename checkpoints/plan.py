"""Who writes what: a pure function of (tensors, world size, rank). Nobody talks to anybody.

All tensors are laid end to end, widest elements first (which keeps every one aligned in its
file), and the line is cut into W pieces of equal bytes, at the next whole element. A rank's
share of a tensor is a *span*: a run of elements in row-major order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from checkpoints.dtypes import BY_NAME

# One hash for this many bytes: what a reader must read to trust any part of it.
CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class TensorSpec:
    """A whole tensor, as every rank knows it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def element_bytes(self) -> int:
        return BY_NAME[self.dtype].size_bytes

    @property
    def size_bytes(self) -> int:
        return self.count * self.element_bytes


@dataclass(frozen=True)
class Span:
    """``count`` elements of a tensor from ``start`` on, in row-major order."""

    start: int
    count: int


def share(
    specs: Sequence[TensorSpec], world_size: int, rank: int
) -> tuple[tuple[TensorSpec, Span], ...]:
    """What ``rank`` writes, in the order in which it stands in its file.

    >>> specs = [TensorSpec("a", "F32", (3,)), TensorSpec("b", "U8", (4,))]
    >>> [(s.name, span.start, span.count) for s, span in share(specs, 2, 0)]
    [('a', 0, 2)]
    >>> [(s.name, span.start, span.count) for s, span in share(specs, 2, 1)]
    [('a', 2, 1), ('b', 0, 4)]
    """
    ordered = sorted(specs, key=lambda spec: -spec.element_bytes)
    total = sum(spec.size_bytes for spec in ordered)
    low, high = total * rank // world_size, total * (rank + 1) // world_size
    pieces = []
    begin = 0
    for spec in ordered:
        start, stop = (_element_at(cut - begin, spec) for cut in (low, high))
        # Empty tensors have no bytes, but readers of safetensors look for their names.
        if stop > start or (spec.count == 0 and rank == 0):
            pieces.append((spec, Span(start, stop - start)))
        begin += spec.size_bytes
    return tuple(pieces)


def _element_at(offset_bytes: int, spec: TensorSpec) -> int:
    """The first element that begins at or after an offset: both sides of a cut agree on it."""
    return min(max(-(-offset_bytes // spec.element_bytes), 0), spec.count)


def chunks(span: Span, element_bytes: int) -> Iterator[Span]:
    """A span in pieces of at most :data:`CHUNK_BYTES`: each is hashed by itself."""
    per_chunk = max(1, CHUNK_BYTES // element_bytes)
    stop = span.start + span.count
    for start in range(span.start, stop, per_chunk):
        yield Span(start, min(per_chunk, stop - start))
