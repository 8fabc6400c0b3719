"""Digests of a rotating part of the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from elastic.train import weight_digest
from elastic.train.weight_digest import BITS, WeightDigest

SHAPES = ((3, 5), (), (7,), (0,), (2, 2, 2), (1,), (11,), (4,), (6,), (13,))


def tensors(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]


def digest_of(own: Sequence[torch.Tensor], first: int = 0) -> WeightDigest:
    return WeightDigest({"model": lambda: own}, same_after=first - 1, first=first)


def bits(digest: WeightDigest, step: int) -> list[int]:
    for earlier in range(step):
        digest.compared(earlier)
    found = digest.bits(step)
    assert found is not None
    numbers: list[int] = found.tolist()
    return numbers


def read_within(own: Sequence[torch.Tensor]) -> int:
    """The number of steps in which everything is read."""
    digest = digest_of(own)
    for step in range(1000):
        digest.compared(step)
    found = digest.changed_in(1000)
    assert found is not None
    return len(found)


Change = Callable[[torch.Tensor], object]
CHANGES: dict[str, Change] = {
    "one value": lambda t: t.view(-1)[-1:].add_(1.0),
    "two signs": lambda t: t.view(-1)[:2].neg_(),
    "two exchanged values": lambda t: t.copy_(t.flip(0)),
}


@pytest.fixture(params=["host", "device"], autouse=True)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test also uses the operations for other devices, on the CPU."""
    if request.param == "device":
        monkeypatch.setattr(weight_digest, "_bits_on_host", weight_digest._bits_on_device)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
)
@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_every_change_is_visible_within_as_many_steps_as_there_are_parts(
    dtype: torch.dtype, change: Change
) -> None:
    own = tensors(dtype)
    steps = range(read_within(own))
    before = [bits(digest_of(own), step) for step in steps]
    for changed in own:
        if changed.numel() > 1:
            copies = [t.clone() for t in own]
            change(copies[[t is changed for t in own].index(True)])
            after = [bits(digest_of(copies), step) for step in steps]
            assert sum(a != b for a, b in zip(after, before, strict=True)) == 1


def test_large_tensors_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_digest, "_SMALL_BYTES", 1 << 10)
    monkeypatch.setattr(weight_digest, "_PARTS", 8)
    monkeypatch.setattr(weight_digest, "_CHUNK_BYTES", 1 << 9)
    monkeypatch.setattr(weight_digest, "_ROW", 1 << 5)
    monkeypatch.setattr(weight_digest, "_factors", weight_digest._factors.__wrapped__)
    own = [torch.randn(5000), torch.randn(3).bfloat16(), torch.randn(70, 3)]
    steps = range(read_within(own))
    assert len(steps) == 9  # the first tensor's parts are full
    before = [bits(digest_of(own), step) for step in steps]
    for index in (0, 127, 128, 129, 4998):
        own[0][index], own[0][index + 1] = own[0][index + 1].clone(), own[0][index].clone()
        after = [bits(digest_of(own), step) for step in steps]
        assert after != before
        before = after


def test_the_bits_are_followed_by_their_complements() -> None:
    found = bits(digest_of(tensors()), 0)
    assert len(found) == 2 * BITS
    assert [a + b for a, b in zip(found[:BITS], found[BITS:], strict=True)] == [1] * BITS
    assert len(set(found)) == 2


def test_replaced_and_non_contiguous_tensors_are_read_as_they_are_now() -> None:
    own = [torch.arange(12.0).view(3, 4)]
    digest = digest_of(own)
    before = bits(digest, 0)
    own[0] = own[0].t().contiguous().t()
    assert bits(digest, 0) == before
    own[0] = own[0] + 1
    assert bits(digest, 0) != before


def test_a_difference_is_dated_by_the_last_step_that_read_the_same_part() -> None:
    parts = read_within(tensors())
    assert parts == 2
    digest = digest_of(tensors(), first=5)
    assert digest.bits(4) is None
    dated = []
    for step in range(5, 9):
        dated.append(digest.changed_in(step))
        digest.compared(step)
    assert dated == [range(5, 5), range(5, 6), range(5, 7), range(6, 8)]


def test_a_part_is_read_until_ranks_have_compared_it() -> None:
    """Steps of an accumulation without reduction send nothing: a part that is chosen by the number
    of the step might never be compared."""
    own = tensors()
    every = [bits(digest_of(own), step) for step in range(read_within(own))]
    digest, seen = digest_of(own), []
    for step in range(8):
        seen.append(digest.bits(step))
        if step % 2 == 1:
            digest.compared(step)
    found = [part.tolist() for part in seen if part is not None]
    assert found == [part for part in every for _ in range(2)] * 2
    assert digest.changed_in(9) == range(5, 9)


def test_a_change_of_the_part_that_was_read_last_is_seen_until_it_is_undone() -> None:
    own = tensors()
    digest = digest_of(own)
    assert not digest.has_part_changed()
    bits(digest, 0)
    has_changed = digest.has_part_changed
    for each in own:
        each.data.mul_(2.0)
    digest.bits(1)
    assert has_changed() and not digest.has_part_changed()
    for each in own:
        each.data.div_(2.0)
    assert not has_changed()


def test_without_a_known_step_a_difference_has_no_date() -> None:
    unknown = WeightDigest({"model": tensors}, same_after=None, first=5)
    assert unknown.changed_in(8) is None


def test_nothing_is_read_without_weights() -> None:
    assert WeightDigest({}, same_after=0, first=0).bits(3) is None
    assert WeightDigest({}, same_after=0, first=0).changed_in(3) == range(1, 3)
    empty = [torch.zeros(0), torch.eye(2).to_sparse()]
    assert WeightDigest({"model": lambda: empty}, same_after=0, first=0).bits(3) is None
