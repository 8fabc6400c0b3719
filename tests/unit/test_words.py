"""What ranks tell each other behind their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic.training.due import Word
from elastic.training.reduction import Reduction
from elastic.training.words import LARGEST_BUCKET_BYTES, Words


class Bucket:
    """What DDP hands to a communication hook."""

    def __init__(self, gradients: torch.Tensor, index: int = 0) -> None:
        self._gradients, self._index = gradients, index

    def buffer(self) -> torch.Tensor:
        return self._gradients

    def index(self) -> int:
        return self._index


@pytest.fixture
def of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)


def reduction(weight: float, said: Word) -> Reduction:
    made = Reduction()
    made.words = Words()
    made.words.say(said)
    made.begin(weight)
    return made


def exchanged(ranks: list[tuple[Reduction, Any]]) -> list[torch.Tensor]:
    """What an all-reduce makes of it, as each rank takes it."""
    sent = [rank.weigh(bucket) for rank, bucket in ranks]
    total = torch.stack(sent).sum(0)
    return [rank.take(total.clone(), bucket.buffer().numel()) for rank, bucket in ranks]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_everybody_hears_what_one_says_and_gradients_are_the_same(
    of_three: None, dtype: torch.dtype
) -> None:
    said = [Word(), Word(save=True, leaving=True), Word()]
    weights = [0.25, 0.5, 0.25]
    gradients = [torch.randn(17).to(dtype) for _ in said]
    expected = torch.stack([g * w for g, w in zip(gradients, weights, strict=True)]).sum(0)
    ranks = [reduction(w, s) for w, s in zip(weights, said, strict=True)]
    taken = exchanged([(r, Bucket(g.clone())) for r, g in zip(ranks, gradients, strict=True)])
    assert all(torch.equal(t, expected) for t in taken)
    heard = [r.words.heard() for r in ranks if r.words is not None]
    assert heard == [Word(save=True, leaving=True)] * 3


def test_a_rank_without_samples_says_its_word_and_no_nan(of_three: None) -> None:
    ranks = [reduction(0.0, Word(stuck=True)), reduction(1.0, Word())]
    nan, ones = torch.full((3,), torch.nan), torch.ones(3)
    taken = exchanged([(ranks[0], Bucket(nan)), (ranks[1], Bucket(ones))])
    assert torch.equal(taken[0], torch.ones(3))
    assert ranks[1].words is not None and ranks[1].words.heard() == Word(stuck=True)


def test_only_the_first_bucket_carries_words_and_only_a_small_one(of_three: None) -> None:
    rank = reduction(0.5, Word(save=True))
    for bucket in (
        Bucket(torch.ones(4), index=1),
        Bucket(torch.ones(LARGEST_BUCKET_BYTES // 4 + 1)),
    ):
        sent = rank.weigh(bucket)  # type: ignore[arg-type]
        assert sent is bucket.buffer() and float(sent[0]) == 0.5
        assert rank.take(sent, sent.numel()) is sent
    assert rank.words is not None and rank.words.heard() is None


def test_a_new_step_forgets_the_last_one_s_words(of_three: None) -> None:
    rank = reduction(1.0, Word(save=True))
    exchanged([(rank, Bucket(torch.ones(4)))])
    assert rank.words is not None and rank.words.heard() == Word(save=True)
    rank.words.say(Word())
    assert rank.words.heard() is None
    exchanged([(rank, Bucket(torch.ones(4)))])
    assert rank.words.heard() == Word()


def test_the_room_for_the_words_is_made_once(of_three: None) -> None:
    rank, bucket = reduction(0.5, Word()), Bucket(torch.ones(4))
    first = rank.weigh(bucket)  # type: ignore[arg-type]
    assert rank.weigh(bucket) is first  # type: ignore[arg-type]
