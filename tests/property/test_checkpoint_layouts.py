"""Any sharding is written once, in equal shares, and can be read into any other sharding."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoints.loading import shares_of
from checkpoints.manifest import Chunk, TensorEntry, coverage_problem
from checkpoints.reader import TensorBuffer
from checkpoints.tensors import (
    Layout,
    Region,
    Span,
    Split,
    TensorSpec,
    block,
    full_region,
    local_shape,
    local_shards,
    regions_of,
    row_blocks,
    share_of,
    split_evenly,
    written_regions,
)

Shape = tuple[int, ...]
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@st.composite
def layouts(draw: st.DrawFn, shape: Shape) -> Layout:
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    kinds: list[st.SearchStrategy[Split | None]] = [st.none()]
    if shape:
        dims = st.integers(0, len(shape) - 1)
        kinds += [st.builds(Split, dims), st.builds(Split, dims, st.integers(1, 3))]
    splits = tuple(draw(st.one_of(kinds)) for _ in mesh_shape)
    count = math.prod(mesh_shape)
    ranks = draw(st.permutations(range(count)))
    return Layout(mesh_shape, tuple(ranks), splits)


@st.composite
def sharded(draw: st.DrawFn) -> tuple[Shape, Layout]:
    shape = draw(shapes)
    return shape, draw(layouts(shape))


def values(shape: Shape) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)


def as_torch_splits(layout: Layout, tensor: torch.Tensor, coordinate: Shape) -> torch.Tensor:
    """The result of torch.chunk for a rank, one dimension of the mesh after the other."""

    def chunk(data: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
        found = list(data.chunk(count, dim)) if data.shape[dim] else []
        return found + [data.narrow(dim, 0, 0)] * (count - len(found))

    for split, size, at in zip(layout.splits, layout.mesh_shape, coordinate, strict=True):
        if split is not None:
            pieces = chunk(tensor, split.factor, split.dim)
            tensor = torch.cat([chunk(p, size, split.dim)[at] for p in pieces], split.dim)
    return tensor


def everywhere(layout: Layout) -> list[Shape]:
    return list(itertools.product(*(range(size) for size in layout.mesh_shape)))


@given(case=sharded())
def test_a_rank_holds_the_shard_that_torch_assigns(case: tuple[Shape, Layout]) -> None:
    shape, layout = case
    tensor = values(shape)
    for coordinate in everywhere(layout):
        local = as_torch_splits(layout, tensor, coordinate)
        assert local_shape(layout, shape, coordinate) == tuple(local.shape)
        seen = 0
        for shard in local_shards(layout, shape, coordinate):
            mine = block(local, Region(shard.local_offset, shard.region.shape))
            assert torch.equal(mine, block(tensor, shard.region))
            seen += shard.region.count
        assert seen == local.numel()


@given(case=sharded(), more=st.integers(0, 3))
def test_every_element_is_written_once_by_a_rank_that_holds_it(
    case: tuple[Shape, Layout], more: int
) -> None:
    shape, layout = case
    size = len(layout.ranks) + more  # ranks outside the mesh write nothing
    spec = TensorSpec("w", "I32", shape, layout)
    times = torch.zeros(shape, dtype=torch.int32)
    for rank in range(size):
        coordinate = layout.coordinate(rank)
        held = (
            [shard.region for shard in local_shards(layout, shape, coordinate)]
            if coordinate
            else []
        )
        for _, place in share_of([spec], size, rank):
            if isinstance(place, Region):
                assert any(region.contains(place) for region in held)
                block(times, place).add_(1)
    assert bool((times == 1).all())


@given(
    shape=st.lists(st.integers(8, 20), min_size=1, max_size=2).map(tuple), copies=st.integers(1, 8)
)
def test_ranks_with_copies_write_equal_slices(shape: Shape, copies: int) -> None:
    layout = Layout((copies,), tuple(range(copies)), (None,))
    counts = [
        sum(b.count for b in written_regions(layout, shape, rank, 0)) for rank in range(copies)
    ]
    assert sum(counts) == math.prod(shape)
    assert max(counts) - min(counts) <= math.prod(shape) // min(shape)


@given(turns=st.integers(1, 40), copies=st.integers(1, 8))
def test_tensors_too_small_to_be_sliced_are_distributed(turns: int, copies: int) -> None:
    layout = Layout((copies,), tuple(range(copies)), (None,))
    owners = [
        [rank for rank in range(copies) if written_regions(layout, (), rank, turn)]
        for turn in range(turns)
    ]
    assert all(len(owner) == 1 for owner in owners)
    counts = [sum(owner == [rank] for owner in owners) for rank in range(copies)]
    assert max(counts) - min(counts) <= 1


@given(shape=shapes, data=st.data())
def test_a_span_is_a_sequence_of_regions(shape: Shape, data: st.DataObject) -> None:
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    span = Span(start, data.draw(st.integers(0, count - start)))
    found: list[int] = []
    for region, before in regions_of(span, shape):
        assert before == len(found)
        found += block(values(shape), region).reshape(-1).tolist()
    assert found == list(range(span.start, span.start + span.count))


@given(shape=shapes, limit=st.integers(1, 40), parts=st.integers(1, 6))
def test_rows_are_contiguous_and_slices_are_complete(shape: Shape, limit: int, parts: int) -> None:
    region = full_region(shape)
    blocks = list(row_blocks(region, limit)) if region.count else []
    assert all(b.count <= limit for b in blocks)
    flat = [x for b in blocks for x in block(values(shape), b).reshape(-1).tolist()]
    assert flat == list(range(region.count))
    slices = [b for b in split_evenly(region, parts) if b.count]
    seen = sorted(x for b in slices for x in block(values(shape), b).reshape(-1).tolist())
    assert seen == list(range(region.count))


def chunks_of(spec: TensorSpec, size: int, limit: int) -> list[Chunk]:
    """All ranks' chunks of a tensor; the chunks are small, with one file each."""
    found, end = [], 0
    for rank in range(size):
        for _, place in share_of([spec], size, rank):
            pieces = row_blocks(place, limit) if isinstance(place, Region) else [place]
            for piece in pieces:
                begin, end = end, end + piece.count * spec.element_bytes
                if piece.count:
                    found.append(Chunk("file", begin, end, piece, "0" * 32))
    return found


@given(data=st.data(), shape=shapes, limit=st.integers(1, 40))
def test_any_sharding_can_be_read_into_any_other(
    data: st.DataObject, shape: Shape, limit: int
) -> None:
    tensor = values(shape)
    saved = data.draw(st.one_of(st.none(), layouts(shape)))
    size = len(saved.ranks) if saved else data.draw(st.integers(1, 5))
    chunks = chunks_of(TensorSpec("w", "I32", shape, saved), size, limit)
    assert coverage_problem(TensorSpec("w", "I32", shape), chunks) is None
    wanted = data.draw(layouts(shape))
    for coordinate in everywhere(wanted):
        mine = [shard.region for shard in local_shards(wanted, shape, coordinate)]
        spare = TensorBuffer(TensorSpec("w", "I32", shape), mine)
        for chunk in chunks:
            content = _content(tensor, chunk)
            contiguous_view = spare.contiguous_view(chunk.place)
            if contiguous_view is not None:
                contiguous_view.copy_(content)
            elif spare.needs(chunk.place):
                spare.put(chunk.place, content)
        for region, memory in spare.blocks:
            assert torch.equal(memory, block(tensor, region))


def _content(tensor: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    if isinstance(chunk.place, Region):
        return block(tensor, chunk.place).reshape(-1)
    return tensor.reshape(-1)[chunk.place.start : chunk.place.start + chunk.place.count]


@given(data=st.data(), case=sharded())
def test_a_wrong_region_is_detected(data: st.DataObject, case: tuple[Shape, Layout]) -> None:
    shape, layout = case
    spec = TensorSpec("w", "I32", shape)
    chunks = chunks_of(TensorSpec("w", "I32", shape, layout), len(layout.ranks), 8)
    if not chunks:
        return
    index = data.draw(st.integers(0, len(chunks) - 1))
    assert coverage_problem(spec, chunks[:index] + chunks[index + 1 :]) is not None
    assert coverage_problem(spec, [*chunks, chunks[index]]) is not None
    if len(chunks) > 1:  # one replaces another
        other = chunks[index - 1]
        moved = Chunk("file", other.begin, other.end, other.place, "0" * 32)
        assert coverage_problem(spec, [*chunks[:index], moved, *chunks[index + 1 :]]) is not None


@given(sizes=st.lists(st.integers(1, 1000), max_size=40), ranks=st.integers(1, 7))
def test_read_shares_are_even_and_contiguous(sizes: list[int], ranks: int) -> None:
    tensor = TensorEntry(TensorSpec("w", "U8", (1,)), ())
    items = [(tensor, Chunk("f", 0, size, Span(0, size), "")) for size in sizes]
    shares = shares_of(items, ranks)
    assert [item for share in shares for item in share] == items
    largest = max(sizes, default=0)
    for mine in shares:
        assert sum(c.end for _, c in mine) <= sum(sizes) / ranks + largest
