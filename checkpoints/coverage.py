"""Do the chunks of a tensor cover each of its elements once?"""

from __future__ import annotations

import math
from collections.abc import Sequence

from checkpoints.manifest import Box, Chunk
from checkpoints.plan import Span, TensorSpec


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
    # As many elements as the tensor and none twice: each once. Sorted along the first dimension,
    # a box is compared only with those that reach into it.
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda b: b.offset):
        open_boxes = [
            b for b in open_boxes if not b.offset or b.offset[0] + b.shape[0] > box.offset[0]
        ]
        if any(_overlap(box, other) for other in open_boxes):
            return "two of its boxes overlap"
        open_boxes.append(box)
    return None


def _overlap(a: Box, b: Box) -> bool:
    return all(
        max(ao, bo) < min(ao + an, bo + bn)
        for ao, an, bo, bn in zip(a.offset, a.shape, b.offset, b.shape, strict=True)
    )
