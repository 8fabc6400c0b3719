"""Any state, any world size: every element written once, in equal shares, and restored exactly."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

import checkpoints
from checkpoints.saving import encode_header
from checkpoints.tensors import BY_NAME, Span, TensorSpec, by_dtype, chunks_of, share_of
from checkpoints.testing import MemoryStorage

shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)
spec_lists = st.lists(st.tuples(st.sampled_from(sorted(BY_NAME)), shapes), max_size=12).map(
    lambda items: [TensorSpec(str(i), dtype, shape) for i, (dtype, shape) in enumerate(items)]
)


@given(specs=spec_lists, world_size=st.integers(1, 9))
def test_shares_are_equal_and_cover_every_element_once(
    specs: list[TensorSpec], world_size: int
) -> None:
    total = sum(spec.size_bytes for spec in specs)
    seen: dict[str, list[int]] = {spec.name: [] for spec in specs}
    for rank in range(world_size):
        pieces = share_of(specs, world_size, rank)
        size = 0
        for spec, span in pieces:
            for piece in chunks_of(span, spec.element_bytes):
                assert isinstance(piece, Span)  # no tensor here is sharded
                seen[spec.name].extend(range(piece.start, piece.start + piece.count))
            assert size % spec.element_bytes == 0  # aligned in the file
            size += span.count * spec.element_bytes
        assert abs(size - total / world_size) <= 16  # one element of the widest type
        assert len(encode_header(pieces)) % 64 == 0
    assert seen == {spec.name: list(range(spec.count)) for spec in specs}


dtypes = st.sampled_from(sorted(by_dtype(), key=str))
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**100), 2**100)
    | st.floats(allow_nan=True)
    | st.text(st.characters(), max_size=5)
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any bits of any type, sometimes as a non-contiguous view."""
    dtype, shape = draw(dtypes), draw(shapes)
    count = torch.Size(shape).numel()
    if dtype == torch.bool:
        raw = bytes(draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)))
    else:
        size = count * dtype.itemsize
        raw = draw(st.binary(min_size=size, max_size=size))
    flat = torch.frombuffer(bytearray(raw or b"\0" * 16), dtype=dtype)
    tensor = flat[:count].reshape(shape)
    if tensor.dim() >= 2 and draw(st.booleans()):
        return tensor.transpose(0, -1)
    return tensor


def _state(leaf: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.text(st.characters(), max_size=3) | st.integers(-3, 3)
    return st.recursive(
        leaf,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(keys, inner, max_size=3)
        ),
        max_leaves=8,
    )


def _same(a: Any, b: Any) -> bool:
    if torch.is_tensor(a) and torch.is_tensor(b):
        return a.dtype == b.dtype and a.shape == b.shape and _bits(a) == _bits(b)
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and repr(a) == repr(b)


def _bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


@given(state=_state(scalars | tensors()), world_size=st.integers(1, 4))
def test_any_state_is_restored_bit_for_bit_at_any_world_size(state: Any, world_size: int) -> None:
    storage = MemoryStorage()
    for rank in range(world_size):
        saved = checkpoints.save(
            storage, state, step=1, nonce="aa", rank=rank, world_size=world_size
        )
    assert saved.committed, saved.notes
    assert _same(checkpoints.load(storage, saved.name).state, state)
