"""Control flags, piggybacked on gradient buckets."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from elastic.errors import GroupAborted, TrainingError
from elastic.train.order import COUNT, ControlFlags, StepFlags
from elastic.train.reduction import Reduction


def reduction(weight: float, step_flags: StepFlags) -> Reduction:
    result = Reduction()
    result.flags = ControlFlags()
    result.flags.send(step_flags)
    result.begin(weight)
    return result


def all_reduce(ranks: list[tuple[Reduction, torch.Tensor]]) -> None:
    """All-reduce gradients with their flags in place, as gloo and NCCL do."""
    sent = []
    for rank, gradients in ranks:
        rank.weigh(gradients)
        sent.append(rank.with_words(gradients))
    total = torch.stack(sent).sum(0)
    for tensor in sent:
        tensor.copy_(total)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_flags_of_one_rank_reach_all_and_gradients_are_unchanged(dtype: torch.dtype) -> None:
    step_flags = [StepFlags(), StepFlags(save=True, leaving=True), StepFlags()]
    weights = [0.25, 0.5, 0.25]
    gradients = [torch.randn(17).to(dtype) for _ in step_flags]
    expected = torch.stack([g * w for g, w in zip(gradients, weights, strict=True)]).sum(0)
    ranks = [reduction(w, s) for w, s in zip(weights, step_flags, strict=True)]
    all_reduce(list(zip(ranks, gradients, strict=True)))
    assert all(torch.equal(g, expected) for g in gradients)
    heard = [r.flags.received() for r in ranks if r.flags is not None]
    assert heard == [StepFlags(save=True, leaving=True)] * 3


def test_a_rank_without_samples_sends_its_flags_but_no_nan() -> None:
    ranks = [reduction(0.0, StepFlags(stuck=True)), reduction(1.0, StepFlags())]
    nan, ones = torch.full((3,), torch.nan), torch.ones(3)
    all_reduce([(ranks[0], nan), (ranks[1], ones)])
    assert torch.equal(nan, torch.ones(3))
    assert ranks[1].flags is not None and ranks[1].flags.received() == StepFlags(stuck=True)


def test_a_new_step_clears_the_previous_flags() -> None:
    rank, gradients = reduction(1.0, StepFlags(save=True)), torch.ones(4)
    rank.with_words(gradients)
    assert rank.flags is not None and rank.flags.received() == StepFlags(save=True)
    assert rank.with_words(gradients) is gradients  # once is enough
    rank.flags.send(StepFlags())
    rank.begin(1.0)
    assert rank.flags.received() is None
    rank.with_words(gradients)
    assert rank.flags.received() == StepFlags()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("steps", "differ"), [((6, 6, 6), False), ((7, 7, 7), False), ((6, 7, 6), True)]
)
def test_gradients_of_different_steps_are_detected_by_all_ranks(
    dtype: torch.dtype, steps: tuple[int, ...], differ: bool
) -> None:
    ranks = [reduction(1.0, StepFlags(save=number == 1)) for number in range(3)]
    for rank, step in zip(ranks, steps, strict=True):
        assert rank.flags is not None
        rank.flags.begin_step(step)
    all_reduce([(rank, torch.ones(4, dtype=dtype)) for rank in ranks])
    for rank, step in zip(ranks, steps, strict=True):
        assert rank.flags is not None
        with pytest.raises(TrainingError, match=f"at step {step}, ") if differ else nullcontext():
            rank.flags.require_one_step(step)
    assert [r.flags.received() for r in ranks if r.flags] == [StepFlags(save=True)] * 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gradients_summed_with_another_collective_are_detected(dtype: torch.dtype) -> None:
    ranks = [reduction(1.0, StepFlags()) for _ in range(3)]
    for rank in ranks:
        assert rank.flags is not None
        rank.flags.begin_step(4, ranks=3)
    sent = [rank.with_words(torch.ones(4, dtype=dtype)) for rank in ranks]
    sums = sent[0] + sent[1] + torch.tensor([7.0, *[0.0] * (3 + COUNT)], dtype=dtype)
    for rank, tensor in zip(ranks[:2], sent[:2], strict=True):
        tensor.copy_(sums)
        assert rank.flags is not None
        with pytest.raises(GroupAborted, match="at step 4, gradients were summed with another"):
            rank.flags.require_one_step(4)


def test_sums_that_a_dtype_cannot_hold_are_not_compared() -> None:
    rank = reduction(1.0, StepFlags())
    assert rank.flags is not None
    rank.flags.begin_step(4, ranks=257)
    rank.with_words(torch.ones(4, dtype=torch.bfloat16))[-2].fill_(256.0)
    rank.flags.require_one_step(4)


def test_a_rank_that_only_participates_in_join_has_no_step() -> None:
    """In ``model.join()``."""
    ranks = [reduction(1.0, StepFlags()) for _ in range(2)]
    for number, rank in enumerate(ranks):
        assert rank.flags is not None
        rank.flags.begin_step(number)
    ranks[0].speak_again()
    all_reduce([(rank, torch.ones(4)) for rank in ranks])
    for number, rank in enumerate(ranks):
        assert rank.flags is not None
        rank.flags.require_one_step(number)


def test_a_bucket_and_its_views_keep_sharing_memory() -> None:
    rank, bucket = reduction(1.0, StepFlags(save=True)), torch.arange(6.0)
    view, before = bucket[2:5].view(3, 1), bucket.clone()
    sent = rank.with_words(bucket)
    flags = torch.zeros(COUNT)
    flags[[0, 5]] = 1.0
    assert torch.equal(sent, torch.cat([before, flags]))
    sent.mul_(3)
    assert torch.equal(bucket, before * 3) and torch.equal(view.flatten(), before[2:5] * 3)
    rank.begin(1.0)
    assert rank.with_words(bucket) is sent
    rank.begin(1.0)
    other = rank.with_words(torch.ones(6))  # DDP has rebuilt its buckets
    assert other is not sent and other.numel() == 6 + COUNT


@pytest.mark.parametrize(
    "bucket",
    [
        torch.ones(6)[:4],  # other memory follows it
        torch.ones(4, dtype=torch.int64),
        torch.ones(4).to_sparse(),
        torch.frombuffer(bytearray(16), dtype=torch.float32),  # memory that cannot grow
    ],
)
def test_a_bucket_that_cannot_carry_flags_is_unchanged(bucket: torch.Tensor) -> None:
    rank = reduction(1.0, StepFlags(save=True))
    assert rank.with_words(bucket) is bucket
    assert rank.flags is not None and rank.flags.received() is None


def test_flags_follow_the_first_dense_bucket() -> None:
    """Each embedding with sparse gradients has its own bucket, and their order may change."""
    rank, dense = reduction(1.0, StepFlags(save=True)), torch.ones(4)
    sent = rank.with_words(dense)
    rank.begin(1.0)
    sparse = torch.ones(4).to_sparse()
    assert rank.with_words(sparse) is sparse
    assert rank.with_words(dense) is sent


def test_no_bucket_is_retained_after_a_world() -> None:
    rank, bucket = reduction(1.0, StepFlags()), torch.ones(4)
    rank.with_words(bucket)
    storage = bucket.untyped_storage()._weak_ref()
    rank.leave()
    del bucket
    assert torch.UntypedStorage._expired(storage)
