"""Do the chunks of a tensor cover each of its elements once?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from checkpoints.format.manifest import Chunk
from checkpoints.tensors.partition import TensorSpec
from checkpoints.tensors.regions import Box, Span

# Tilings that no cut divides (a pinwheel) are compared pair by pair; no layout makes large ones.
_MAX_TANGLE = 2000


def coverage_problem(spec: TensorSpec, chunks: Sequence[Chunk]) -> str | None:
    """What is wrong with the chunks of a tensor, or None."""
    for chunk in chunks:
        count = chunk.place.count if isinstance(chunk.place, Span) else math.prod(chunk.place.shape)
        if chunk.end - chunk.begin != count * spec.element_bytes:
            return "a chunk has more or fewer bytes than its elements"
    spans = [chunk.place for chunk in chunks if isinstance(chunk.place, Span)]
    boxes = [chunk.place for chunk in chunks if isinstance(chunk.place, Box)]
    if spans and boxes:
        return "spans and boxes are mixed"
    return _boxes_problem(spec, boxes) if boxes else _spans_problem(spec, spans)


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


def _boxes_problem(spec: TensorSpec, boxes: list[Box]) -> str | None:
    for box in boxes:
        if len(box.offset) != len(spec.shape) or len(box.shape) != len(spec.shape):
            return "a box has another number of dimensions than its tensor"
        if any(o + s > n for o, s, n in zip(box.offset, box.shape, spec.shape, strict=True)):
            return "a box reaches out of its tensor"
    if sum(math.prod(box.shape) for box in boxes) != spec.count:
        return "its boxes have more or fewer elements than it"
    # As many elements as the tensor and none twice: each once.
    return _overlap_problem(boxes, len(spec.shape))


def _overlap_problem(boxes: list[Box], dims: int) -> str | None:
    """Divide by cuts that no box crosses, as all grids can be; what is left, pair by pair."""
    groups = [boxes]
    while groups:
        group = groups.pop()
        for dim in range(dims):
            parts = list(_parts(group, dim))
            if len(parts) > 1:
                groups += [part for part in parts if len(part) > 1]
                break
        else:
            if len(group) > _MAX_TANGLE:
                return f"{len(group)} of its boxes cannot be told apart"
            for index, box in enumerate(group):
                if any(box & other for other in group[:index]):
                    return "two of its boxes overlap"
    return None


def _parts(boxes: list[Box], dim: int) -> Iterator[list[Box]]:
    part: list[Box] = []
    reached = 0
    for box in sorted(boxes, key=lambda b: b.offset[dim]):
        if part and box.offset[dim] >= reached:
            yield part
            part = []
        part.append(box)
        reached = max(reached, box.offset[dim] + box.shape[dim])
    yield part
