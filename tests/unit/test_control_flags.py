"""What ranks tell each other behind their gradients."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from elastic.errors import TrainingError
from elastic.training.gradients.control_flags import ControlFlags, StepFlags
from elastic.training.gradients.reduction import Reduction


def reduction(weight: float, said: StepFlags) -> Reduction:
    made = Reduction()
    made.flags = ControlFlags()
    made.flags.send(said)
    made.begin(weight)
    return made


def exchanged(ranks: list[tuple[Reduction, torch.Tensor]]) -> None:
    """What an all-reduce makes of it, in place, as gloo and NCCL do."""
    sent = []
    for rank, gradients in ranks:
        rank.weigh(gradients)
        sent.append(rank.with_words(gradients))
    total = torch.stack(sent).sum(0)
    for tensor in sent:
        tensor.copy_(total)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_everybody_hears_what_one_says_and_gradients_are_the_same(dtype: torch.dtype) -> None:
    said = [StepFlags(), StepFlags(save=True, leaving=True), StepFlags()]
    weights = [0.25, 0.5, 0.25]
    gradients = [torch.randn(17).to(dtype) for _ in said]
    expected = torch.stack([g * w for g, w in zip(gradients, weights, strict=True)]).sum(0)
    ranks = [reduction(w, s) for w, s in zip(weights, said, strict=True)]
    exchanged(list(zip(ranks, gradients, strict=True)))
    assert all(torch.equal(g, expected) for g in gradients)
    heard = [r.flags.received() for r in ranks if r.flags is not None]
    assert heard == [StepFlags(save=True, leaving=True)] * 3


def test_a_rank_without_samples_says_its_word_and_no_nan() -> None:
    ranks = [reduction(0.0, StepFlags(stuck=True)), reduction(1.0, StepFlags())]
    nan, ones = torch.full((3,), torch.nan), torch.ones(3)
    exchanged([(ranks[0], nan), (ranks[1], ones)])
    assert torch.equal(nan, torch.ones(3))
    assert ranks[1].flags is not None and ranks[1].flags.received() == StepFlags(stuck=True)


def test_a_new_step_forgets_the_last_one_s_words() -> None:
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
def test_gradients_of_different_steps_are_noticed_by_all(
    dtype: torch.dtype, steps: tuple[int, ...], differ: bool
) -> None:
    ranks = [reduction(1.0, StepFlags(save=number == 1)) for number in range(3)]
    for rank, step in zip(ranks, steps, strict=True):
        assert rank.flags is not None
        rank.flags.begin_step(step)
    exchanged([(rank, torch.ones(4, dtype=dtype)) for rank in ranks])
    for rank, step in zip(ranks, steps, strict=True):
        assert rank.flags is not None
        with pytest.raises(TrainingError, match=f"at step {step}, ") if differ else nullcontext():
            rank.flags.require_one_step(step)
    assert [r.flags.received() for r in ranks if r.flags] == [StepFlags(save=True)] * 3


def test_a_rank_that_only_takes_part_has_no_step() -> None:
    """In ``model.join()``."""
    ranks = [reduction(1.0, StepFlags()) for _ in range(2)]
    for number, rank in enumerate(ranks):
        assert rank.flags is not None
        rank.flags.begin_step(number)
    ranks[0].speak_again()
    exchanged([(rank, torch.ones(4)) for rank in ranks])
    for number, rank in enumerate(ranks):
        assert rank.flags is not None
        rank.flags.require_one_step(number)


def test_a_bucket_and_its_views_stay_the_same_memory() -> None:
    rank, bucket = reduction(1.0, StepFlags(save=True)), torch.arange(6.0)
    view, before = bucket[2:5].view(3, 1), bucket.clone()
    sent = rank.with_words(bucket)
    assert torch.equal(sent, torch.cat([before, torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0])]))
    sent.mul_(3)
    assert torch.equal(bucket, before * 3) and torch.equal(view.flatten(), before[2:5] * 3)
    rank.begin(1.0)
    assert rank.with_words(bucket) is sent
    rank.begin(1.0)
    other = rank.with_words(torch.ones(6))  # DDP has built its buckets anew
    assert other is not sent and other.numel() == 11


@pytest.mark.parametrize(
    "bucket",
    [
        torch.ones(6)[:4],  # somebody else's memory is behind it
        torch.ones(4, dtype=torch.int64),
        torch.ones(4).to_sparse(),
        torch.frombuffer(bytearray(16), dtype=torch.float32),  # memory that cannot grow
    ],
)
def test_where_words_cannot_be_behind_gradients_nothing_is_said(bucket: torch.Tensor) -> None:
    rank = reduction(1.0, StepFlags(save=True))
    assert rank.with_words(bucket) is bucket
    assert rank.flags is not None and rank.flags.received() is None


def test_flags_follow_the_first_dense_bucket() -> None:
    """Of embeddings with sparse gradients, each is a bucket; which comes first may change."""
    rank, dense = reduction(1.0, StepFlags(save=True)), torch.ones(4)
    sent = rank.with_words(dense)
    rank.begin(1.0)
    sparse = torch.ones(4).to_sparse()
    assert rank.with_words(sparse) is sparse
    assert rank.with_words(dense) is sent


def test_after_a_world_no_bucket_is_held() -> None:
    rank, bucket = reduction(1.0, StepFlags()), torch.ones(4)
    rank.with_words(bucket)
    storage = bucket.untyped_storage()._weak_ref()
    rank.leave()
    del bucket
    assert torch.UntypedStorage._expired(storage)
