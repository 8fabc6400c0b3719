"""Checks that the chunks of a tensor cover each of its elements exactly once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from checkpoints.format.manifest import Chunk
from checkpoints.tensors.partition import TensorSpec
from checkpoints.tensors.regions import Region, Span

# Tilings that no straight cut divides (a pinwheel) are compared pairwise. No layout produces large
# ones.
_MAX_PAIRWISE = 2000


def coverage_problem(spec: TensorSpec, chunks: Sequence[Chunk]) -> str | None:
    """What is wrong with the chunks of a tensor, or None."""
    for chunk in chunks:
        count = chunk.place.count if isinstance(chunk.place, Span) else math.prod(chunk.place.shape)
        if chunk.end - chunk.begin != count * spec.element_bytes:
            return "the size of a chunk does not match its number of elements"
    spans = [chunk.place for chunk in chunks if isinstance(chunk.place, Span)]
    regions = [chunk.place for chunk in chunks if isinstance(chunk.place, Region)]
    if spans and regions:
        return "spans and regions are mixed"
    return _regions_problem(spec, regions) if regions else _spans_problem(spec, spans)


def _spans_problem(spec: TensorSpec, spans: list[Span]) -> str | None:
    reached = 0
    for span in sorted(spans, key=lambda s: s.start):
        if span.start > reached:
            return f"elements {reached} to {span.start} are in no chunk"
        if span.start < reached:
            return f"element {span.start} is in two chunks"
        reached += span.count
    if reached < spec.count:
        return f"elements {reached} to {spec.count} are in no chunk"
    return f"its chunks have {reached} elements, not {spec.count}" if reached > spec.count else None


def _regions_problem(spec: TensorSpec, regions: list[Region]) -> str | None:
    for region in regions:
        if len(region.offset) != len(spec.shape) or len(region.shape) != len(spec.shape):
            return "a region and its tensor differ in the number of dimensions"
        if any(o + s > n for o, s, n in zip(region.offset, region.shape, spec.shape, strict=True)):
            return "a region exceeds the bounds of its tensor"
    if sum(math.prod(region.shape) for region in regions) != spec.count:
        return "its regions do not have as many elements as the tensor"
    # The right number of elements and no overlap: each is covered once.
    return _overlap_problem(regions, len(spec.shape))


def _overlap_problem(regions: list[Region], dims: int) -> str | None:
    """Divide along cuts that no region crosses; compare pairwise what cannot be divided."""
    groups = [regions]
    while groups:
        group = groups.pop()
        for dim in range(dims):
            parts = list(_parts(group, dim))
            if len(parts) > 1:
                groups += [part for part in parts if len(part) > 1]
                break
        else:
            if len(group) > _MAX_PAIRWISE:
                return f"{len(group)} of its regions interlock: too many to check for overlap"
            for index, region in enumerate(group):
                if any(region & other for other in group[:index]):
                    return "two of its regions overlap"
    return None


def _parts(regions: list[Region], dim: int) -> Iterator[list[Region]]:
    part: list[Region] = []
    reached = 0
    for region in sorted(regions, key=lambda b: b.offset[dim]):
        if part and region.offset[dim] >= reached:
            yield part
            part = []
        part.append(region)
        reached = max(reached, region.offset[dim] + region.shape[dim])
    yield part
