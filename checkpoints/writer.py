"""One writer's share: a safetensors file, then the part that vouches for it.

Each chunk is hashed and handed to the file in one pass, straight from the tensor's memory where
that is contiguous and on the CPU. Only the rank's own share is ever copied.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from checkpoints.dtypes import BY_NAME
from checkpoints.manifest import Chunk, Writer
from checkpoints.naming import writer_file
from checkpoints.plan import Span, TensorSpec, chunks
from checkpoints.sealed import digest
from checkpoints.storage import Storage

Pieces = Sequence[tuple[TensorSpec, Span]]
Data = Callable[[TensorSpec, Span], memoryview]
"""The bytes of a run of elements of a tensor."""


@dataclass(frozen=True)
class Written:
    """A file on disk, durable but for its name."""

    writer: Writer
    chunks: Mapping[str, tuple[Chunk, ...]]


def write_share(
    storage: Storage,
    folder: str,
    pieces: Pieces,
    data_of: Data,
    *,
    rank: int,
    world_size: int,
    wall_time_s: float,
) -> Written:
    """Write this rank's pieces and fsync them. Raises ``OSError``."""
    file = writer_file(rank, world_size)
    head = header(pieces)
    found: dict[str, list[Chunk]] = {}
    end = len(head)
    sink = storage.create(f"{folder}/{file}")
    try:
        sink.write(head)
        for spec, span in pieces:
            for piece in chunks(span, spec.element_bytes):
                data = data_of(spec, piece)
                sink.write(data)
                begin, end = end, end + len(data)
                found.setdefault(spec.name, []).append(Chunk(file, begin, end, piece, digest(data)))
        sink.sync()
    finally:
        sink.close()
    writer = Writer(rank, file, end, len(head), digest(head), wall_time_s)
    return Written(writer, {name: tuple(items) for name, items in found.items()})


def header(pieces: Pieces) -> bytes:
    """The head of a safetensors file: 8 bytes of length, JSON, spaces up to a multiple of 64.

    A tensor that stands whole in the file has its own name and shape there, so that a checkpoint
    of one writer is an ordinary safetensors file; a piece of one is named ``name[start:stop]``.
    """
    entries: dict[str, object] = {}
    begin = 0
    for spec, span in pieces:
        element = BY_NAME[spec.dtype]
        whole = span.count == spec.count
        name = spec.name if whole else f"{spec.name}[{span.start}:{span.start + span.count}]"
        while name in entries:  # a tensor may be called like a piece of another
            name += "~"
        end = begin + span.count * element.size_bytes
        entries[name] = {
            "dtype": element.file_name,
            "shape": [*(spec.shape if whole else (span.count,)), *element.file_shape],
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-(len(text) + 8) % 64)
    return len(text).to_bytes(8, "little") + text


def bytes_of(tensor: torch.Tensor, span: Span) -> memoryview:
    """The bytes of a run of elements; a view of the tensor's memory where that is possible."""
    flat = elements(tensor, span).cpu()
    if flat.stride(0) != 1:  # one element of a strided row counts as contiguous, yet has no view
        flat = torch.empty_like(flat, memory_format=torch.contiguous_format).copy_(flat)
    return flat.view(torch.uint8).numpy().data


def elements(tensor: torch.Tensor, span: Span) -> torch.Tensor:
    """A run of elements in row-major order; a view where that is possible."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_contiguous() or tensor.dim() == 0:
        return tensor.reshape(-1)[span.start : span.start + span.count]
    # Copy only the rows that the span touches, not the whole tensor.
    row = tensor[0].numel()
    first, last = span.start // row, -(-(span.start + span.count) // row)
    start = span.start - first * row
    return tensor[first:last].reshape(-1)[start : start + span.count]
