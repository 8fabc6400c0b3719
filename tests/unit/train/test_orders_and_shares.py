"""``run.loader(…, order=, micro_batches=, weights=)``: what frameworks define an update by."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, TensorDataset

from elastic.errors import ConfigError, TrainingError
from elastic.train.loader import ElasticLoader, Share

N = 23


def shuffled(epoch: int) -> list[int]:
    return torch.randperm(N, generator=torch.Generator().manual_seed(epoch)).tolist()


def loader(data: DataLoader[Any] | None = None, **options: Any) -> ElasticLoader:
    if data is None:
        data = DataLoader(TensorDataset(torch.arange(N)), 2, shuffle=True)
    return ElasticLoader(data, **{"largest_world": 3, **options})


def read(one: ElasticLoader, rank: int = 0, size: int = 1) -> list[list[int]]:
    return [batch.tolist() for _, (batch,) in one.batches(rank, size)]


def samples(one: ElasticLoader) -> list[int]:
    return list(chain.from_iterable(read(one)))


def shares(one: ElasticLoader, rank: int, size: int) -> list[Share]:
    return [one.share for _ in one.batches(rank, size)]


# -- orders ---------------------------------------------------------------------------------------


def test_an_epoch_has_the_given_order() -> None:
    one = loader(order=shuffled, global_batch=5)
    for epoch in range(3):
        one.begin_epoch(epoch)
        assert samples(one) == shuffled(epoch)


def test_an_order_may_repeat_and_omit_samples() -> None:
    one = loader(order=lambda epoch: [4, 4, 0, 22, 4], global_batch=2)
    assert read(one) == [[4, 4], [0, 22], [4]]
    assert len(one) == 3


def test_an_order_of_batches_is_not_divided() -> None:
    one = loader(order=lambda epoch: [[1, 2], [3], [4, 5, 6], [7]])
    assert len(one) == 2  # one batch for each of three ranks, then one
    assert [read(one, rank, 3)[0] for rank in range(3)] == [[1, 2], [3], [4, 5, 6]]


class Endless(Sampler[int]):
    """The sampler of a framework: only its order is used."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("the sampler is not read")


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 2, "sampler": Endless()},
        {"batch_sampler": BatchSampler(Endless(), 2, drop_last=False)},
        {"batch_size": None, "sampler": BatchSampler(Endless(), 2, drop_last=False)},
    ],
    ids=["sampler", "batch sampler", "lists of indices"],
)
def test_the_loaders_own_sampler_is_not_read(options: dict[str, Any]) -> None:
    one = loader(DataLoader(TensorDataset(torch.arange(N)), **options), order=shuffled)
    assert one.plan.global_batch == 6
    assert samples(one) == shuffled(0)


def test_single_indices_for_batches_of_unknown_size_need_a_global_batch() -> None:
    data = DataLoader(TensorDataset(torch.arange(N)), batch_sampler=[[0, 1], [2]])
    with pytest.raises(ConfigError, match="the batch size is unknown"):
        loader(data, order=shuffled)
    assert samples(loader(data, order=shuffled, global_batch=4)) == shuffled(0)


def test_a_sampler_without_a_generator_is_repeatable() -> None:
    """While an order is computed, default generators have a seed, and are restored."""
    sampler = RandomSampler(range(N))
    before = torch.random.get_rng_state(), random.getstate()
    orders = [samples(loader(order=lambda epoch: sampler)) for _ in range(2)]
    assert orders[0] == orders[1] != list(range(N))
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert random.getstate() == before[1]


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (lambda epoch: [], "is empty"),
        (lambda epoch: [0, N], f"has index {N}"),
        (lambda epoch: [0.5], "does not contain sample indices"),
        (lambda epoch: [os.urandom(8)[0] % N for _ in range(20)], "other indices each time"),
        ([1, 2, 3], "not a function"),
    ],
    ids=["empty", "outside", "fractions", "not repeatable", "a list"],
)
def test_unusable_orders_are_refused(order: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loader(order=order)


def test_an_epoch_of_another_length_is_refused() -> None:
    one = loader(order=lambda epoch: range(N - epoch))
    one.begin_epoch(2)
    with pytest.raises(ConfigError, match=rf"order\(2\) returns {N - 2} samples, but .* {N}"):
        read(one)


def resumed(state: dict[str, Any], order: Callable[[int], Sequence[int]]) -> ElasticLoader:
    one = loader(order=order, global_batch=5)
    one.load_state_dict(json.loads(json.dumps(state)))
    return one


def test_a_job_resumes_in_the_middle_of_an_epoch_with_the_same_order_only() -> None:
    one = loader(order=shuffled, global_batch=5)
    one.begin_epoch(3)
    next(one.batches(0, 1))
    one.advance()
    state = one.state_dict()
    again = resumed(state, shuffled)
    assert again.state_dict() == state  # also if it is saved again before it is read
    assert samples(again) == shuffled(3)[5:]

    def changed(epoch: int) -> list[int]:
        return shuffled(epoch + 10 * (epoch > 0))

    with pytest.raises(ConfigError, match=r"the order of epoch 3 is sha256 .* has begun"):
        read(resumed(state, changed))
    other = resumed(state, changed)
    other.begin_epoch(4)  # of which no step is done
    assert samples(other) == shuffled(14)


def test_a_job_resumes_at_the_beginning_of_an_epoch_with_another_order() -> None:
    one = loader(order=shuffled, global_batch=5)
    one.begin_epoch(1)
    read(one)
    assert "order" not in one.state_dict()


def test_an_order_that_changes_during_an_epoch_is_refused_at_the_end_of_the_first_one() -> None:
    losses = torch.zeros(N)
    one = loader(order=lambda epoch: losses.argsort(stable=True), global_batch=5)
    with pytest.raises(ConfigError, match=r"order\(0\) returns other indices at the end"):
        for _ in one.batches(0, 1):
            losses[0] += 1
            one.advance()
    assert one.position.step == len(one)


def test_an_order_may_change_between_epochs() -> None:
    losses = torch.zeros(N)
    one = loader(order=lambda epoch: losses.argsort(stable=True), global_batch=5)
    for epoch in range(3):
        one.begin_epoch(epoch)
        losses[epoch] += 1  # by a script, before its loop
        for _ in one.batches(0, 1):
            one.advance()


# -- micro-batches --------------------------------------------------------------------------------


def test_the_default_global_batch_is_that_of_all_micro_batches() -> None:
    one = loader(micro_batches=2)
    assert one.plan.global_batch == 2 * 3 * 2


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_shorter_last_step_has_fewer_micro_batches(size: int) -> None:
    """As frameworks count: 23 samples are four batches of 2 on each of 3 ranks; 3 and 1 of them."""
    one = loader(order=shuffled, micro_batches=3)
    counts = [[len(part.micro_batches) for part in shares(one, r, size)] for r in range(size)]
    assert counts == [[3, 3, 3, 1]] * size
    assert one.micro_batches_per_epoch == 4


@pytest.mark.parametrize(("n", "kept"), [(23, 18), (24, 24), (29, 24), (6, 6)])
def test_drop_last_drops_what_does_not_fill_a_micro_batch_of_all_ranks(n: int, kept: int) -> None:
    data = DataLoader(TensorDataset(torch.arange(n)), 2, drop_last=True)
    one = loader(data, micro_batches=3)
    assert samples(one) == list(range(kept))
    assert one.micro_batches_per_epoch == kept // 6


def test_drop_last_of_less_than_a_micro_batch_is_refused() -> None:
    data = DataLoader(TensorDataset(torch.arange(5)), 2, drop_last=True)
    with pytest.raises(ConfigError, match="5 samples, global batch of 18 in 3 micro-batches"):
        loader(data, micro_batches=3)


def test_a_share_smaller_than_the_number_of_micro_batches_reads_fillers() -> None:
    one = loader(order=shuffled, micro_batches=6, global_batch=6)
    for rank in range(3):
        infos = [info for info, _ in one.batches(rank, 3)][:6]
        assert [info.samples for info in infos] == [1, 1, 0, 0, 0, 0]
        assert [info.weight for info in infos] == [0.5, 0.5, 0, 0, 0, 0]


def test_the_number_and_the_size_of_micro_batches_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="micro_batch=2 and micro_batches=3"):
        loader(micro_batch=2, micro_batches=3)
    with pytest.raises(ConfigError, match="cannot be divided into 9 micro-batches"):
        loader(micro_batches=9, global_batch=8)


def test_the_number_of_micro_batches_may_change_on_resume() -> None:
    state = loader(micro_batches=2, global_batch=12).state_dict()
    loader(micro_batches=3, global_batch=12).load_state_dict(state)
    dropping = DataLoader(TensorDataset(torch.arange(N)), 2, drop_last=True)
    state = loader(dropping, micro_batches=2, global_batch=12).state_dict()
    with pytest.raises(ConfigError, match="saved with micro_batches=2"):  # drops other samples
        loader(dropping, micro_batches=3, global_batch=12).load_state_dict(state)


# -- weights and shares ---------------------------------------------------------------------------


def test_a_share_names_positions_and_total() -> None:
    one = loader(order=shuffled, micro_batches=2, global_batch=10)
    batches = one.batches(1, 3)
    next(batches)
    next(batches)
    share = one.share
    assert (share.epoch, share.step, share.ranks, share.total) == (0, 0, 3, 10)
    assert share.positions == range(4, 7)
    assert share.micro_batches == (range(4, 6), range(6, 7))
    assert share.micro_batch == 1
    assert share.mean_weights == (2 / 3, 1 / 3)


def test_equal_weights() -> None:
    one = loader(order=shuffled, micro_batches=2, global_batch=10, weights="equal")
    infos = [info for info, _ in one.batches(1, 3)][:2]
    assert [(info.weight, info.rank_weight) for info in infos] == [(1.0, 1 / 3)] * 2
    assert infos[0].share.mean_weights == pytest.approx((2 * 3 / 10, 1 * 3 / 10))


def test_weights_of_the_largest_world_are_the_same_in_all_worlds() -> None:
    one = loader(order=shuffled, micro_batches=2, global_batch=10, weights="largest")
    infos = [info for info, _ in one.batches(1, 2)][:2]
    assert [(info.weight, info.rank_weight) for info in infos] == [(1.0, 1 / 3)] * 2
    assert sum(infos[0].share.mean_weights) == pytest.approx(5 * 2 / 10)


def test_unknown_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match="weights='tokens'"):
        loader(weights="tokens")


def test_there_is_no_share_outside_of_a_step() -> None:
    one = loader(global_batch=6)
    with pytest.raises(TrainingError, match="outside of a step"):
        _ = one.share
    next(one.batches(0, 1))
    assert one.share.step == 0
    one.advance()
    with pytest.raises(TrainingError, match="outside of a step"):
        _ = one.share
