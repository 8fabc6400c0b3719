"""The plan of an epoch and the sampler: which samples a rank reads, in any world."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from elastic.errors import ConfigError
from elastic.train.sampler import ElasticSampler, EpochPlan, Position


def numbers(n: int) -> TensorDataset:
    return TensorDataset(torch.arange(n))


def sampler(n: int = 103, rank: int = 0, size: int = 1, **options: Any) -> ElasticSampler:
    return ElasticSampler(numbers(n), size, rank, **{"global_batch": 10, **options})


def epoch_of_world(size: int, **options: Any) -> list[int]:
    return [index for rank in range(size) for index in sampler(rank=rank, size=size, **options)]


# -- the plan -------------------------------------------------------------------------------------


def test_the_last_step_takes_the_remaining_samples() -> None:
    plan = EpochPlan(103, 10)
    assert plan.steps == 11
    assert (plan.span(0), plan.span(10)) == ((0, 10), (100, 103))


def test_a_full_last_step_is_not_followed_by_an_empty_one() -> None:
    assert EpochPlan(100, 10).steps == 10
    assert EpochPlan(100, 10, drop_last=True).steps == 10


def test_a_dataset_smaller_than_the_batch_is_one_step() -> None:
    plan = EpochPlan(7, 10)
    assert (plan.steps, plan.span(0)) == (1, (0, 7))


def test_shares_are_contiguous_and_even() -> None:
    plan = EpochPlan(103, 10)
    assert [plan.share(20, 30, rank, 4) for rank in range(4)] == [
        (20, 23),
        (23, 26),
        (26, 28),
        (28, 30),
    ]


def test_all_ranks_run_the_same_number_of_micro_batches() -> None:
    plan = EpochPlan(103, 10)
    assert plan.micro_batches(0, 10, 0, 3, 3) == [(0, 2), (2, 4)]
    assert plan.micro_batches(0, 10, 1, 3, 3) == [(4, 6), (6, 7)]  # rather than 3 and an empty one
    # One sample for two ranks: the other runs a micro-batch that does not count.
    assert plan.micro_batches(102, 103, 0, 2, 5) == [(102, 103)]
    assert plan.micro_batches(102, 103, 1, 2, 5) == [(103, 103)]


def test_shards_are_the_same_slices_in_every_world() -> None:
    plan = EpochPlan(100, 10, shards=4)
    slices = [(0, 3), (3, 6), (6, 8), (8, 10)]
    for size in (1, 2, 3, 4):
        ranks = [plan.micro_batches(0, 10, rank, size) for rank in range(size)]
        assert len({len(rank) for rank in ranks}) == 1
        assert [span for rank in ranks for span in rank if span[0] < span[1]] == slices
        starts = [plan.share(0, 10, rank, size) for rank in range(size)]
        assert starts[0][0] == 0 and starts[-1][1] == 10


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"n": 0, "global_batch": 4}, "empty"),
        ({"n": 9, "global_batch": 0}, "global_batch is 0"),
        ({"n": 3, "global_batch": 4, "drop_last": True}, "3 samples, global batch of 4"),
        ({"n": 9, "global_batch": 4, "shards": 5}, "5 shards"),
        ({"n": 9, "global_batch": 4, "shards": 0}, "0 shards"),
    ],
)
def test_invalid_sizes_are_rejected(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        EpochPlan(**arguments)


def test_a_world_larger_than_the_global_batch_is_rejected_with_a_hint() -> None:
    with pytest.raises(ConfigError, match=r"global batch of 2 .* 3 ranks") as refused:
        EpochPlan(100, 2).check_world(0, 3)
    assert "at least 3" in refused.value.hint
    with pytest.raises(ConfigError, match="2 shards are fewer than the world of 3"):
        EpochPlan(100, 10, shards=2).check_world(0, 3)


@pytest.mark.parametrize(("rank", "size"), [(3, 3), (-1, 3), (0, 0)])
def test_invalid_ranks_are_rejected(rank: int, size: int) -> None:
    with pytest.raises(ConfigError, match=f"rank {rank} .* world of {size}"):
        sampler(rank=rank, size=size)


# -- the sampler, in place of the stock one -------------------------------------------------------


def test_an_elastic_sampler_is_a_distributed_sampler() -> None:
    assert isinstance(sampler(), DistributedSampler)
    assert (sampler(size=3, rank=2).rank, sampler(size=3).num_replicas) == (2, 3)


def test_without_a_process_group_the_world_has_one_rank() -> None:
    assert sorted(ElasticSampler(numbers(103), global_batch=10)) == list(range(103))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10])
def test_the_world_reads_every_sample_once(size: int) -> None:
    assert sorted(epoch_of_world(size)) == list(range(103))


@pytest.mark.parametrize("size", [1, 3])
def test_len_equals_the_number_of_iterated_samples(size: int) -> None:
    for rank in range(size):
        for drop_last in (False, True):
            one = sampler(rank=rank, size=size, drop_last=drop_last)
            assert len(one) == len(list(one))
    assert len(sampler(rank=0, size=3)) + len(sampler(rank=1, size=3)) + len(
        sampler(rank=2, size=3)
    ) == len(numbers(103))


def test_drop_last_omits_the_incomplete_step() -> None:
    read = epoch_of_world(3, drop_last=True)
    assert len(read) == len(set(read)) == 100


def test_set_epoch_draws_a_new_order() -> None:
    one = sampler()
    first = list(one)
    assert list(one) == first
    one.set_epoch(1)
    second = list(one)
    assert second != first and sorted(second) == sorted(first)
    one.set_epoch(0)
    assert list(one) == first


def test_without_shuffle_the_dataset_is_read_in_order() -> None:
    assert list(sampler(shuffle=False)) == list(range(103))


def test_seeds_draw_different_orders() -> None:
    assert list(sampler(seed=1)) != list(sampler(seed=2))


def test_with_a_plain_data_loader_each_batch_is_one_step() -> None:
    batches: list[list[list[int]]] = []
    for rank in range(3):
        own = sampler(rank=rank, size=3)
        loader = DataLoader(numbers(103), sampler=own, batch_size=own.rank_batch)
        batches.append([batch.tolist() for (batch,) in loader])
    reference = list(sampler())
    for step in range(10):
        of_step = [index for rank in batches for index in rank[step]]
        assert of_step == reference[step * 10 : step * 10 + 10]


def test_an_empty_dataset_is_rejected() -> None:
    with pytest.raises(ConfigError, match="empty"):
        sampler(n=0)


def test_a_dataset_without_len_is_rejected() -> None:
    class Endless(Dataset[int]):
        def __getitem__(self, index: int) -> int:
            return index

    with pytest.raises(ConfigError, match="Endless has no len"):
        ElasticSampler(Endless(), 1, 0, global_batch=4)


# -- positions ------------------------------------------------------------------------------------


def test_a_position_is_resumed_in_another_world() -> None:
    reference = list(sampler())
    before = [sampler(rank=rank, size=3) for rank in range(3)]
    done = [next(steps).indices for steps in (one.steps() for one in before)]
    for one in before:
        one.advance()
    state = json.loads(json.dumps(before[0].state_dict()))
    after = [sampler(rank=rank, size=2) for rank in range(2)]
    for one in after:
        one.load_state_dict(state)
        assert one.position == Position(0, 1)
    left = [index for one in after for index in one]
    assert [index for part in done for index in part] == reference[:10]
    assert sorted(left) == sorted(reference[10:])


def test_set_epoch_of_the_resumed_epoch_keeps_its_position() -> None:
    one = sampler()
    one.seek(Position(2, 4))
    one.set_epoch(2)
    assert one.position == Position(2, 4)
    one.set_epoch(3)
    assert one.position == Position(3, 0)


def test_len_does_not_depend_on_the_position() -> None:
    one = sampler()
    one.seek(Position(0, 5))
    assert len(one) == 103 and len(list(one)) == 53


def test_set_world_changes_the_shares_and_not_the_order() -> None:
    one = sampler(rank=0, size=2)
    alone = next(iter(sampler().steps())).indices
    assert next(iter(one.steps())).indices == alone[:5]
    one.set_world(1, 5)
    assert next(iter(one.steps())).indices == alone[2:4]
    with pytest.raises(ConfigError, match="smaller than the world of 11"):
        one.set_world(0, 11)


def test_an_iteration_in_progress_ignores_later_changes() -> None:
    one = sampler()
    steps = one.steps()
    one.advance()
    one.set_world(1, 2)
    assert len(list(steps)) == 11
    assert sum(1 for _ in one) == 46  # half of ten steps less the first; 1 of the last 3


def test_the_end_of_an_epoch_is_a_valid_position() -> None:
    one = sampler()
    one.seek(Position(0, 11))
    assert list(one) == []
    with pytest.raises(ConfigError, match="step 12"):
        one.advance()


@pytest.mark.parametrize("position", [Position(-1, 0), Position(0, -1), Position(0, 12)])
def test_invalid_positions_are_rejected(position: Position) -> None:
    with pytest.raises(ConfigError, match=f"step {position.step}"):
        sampler().seek(position)


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ({"n": 104}, ["n=103", "n=104"]),
        ({"global_batch": 20}, ["global_batch=10", "global_batch=20"]),
        ({"seed": 5}, ["seed=0", "seed=5"]),
        ({"shuffle": False}, ["shuffle=True", "shuffle=False"]),
        ({"drop_last": True}, ["drop_last=False", "drop_last=True"]),
        ({"shards": 5}, ["shards=None", "shards=5"]),
        ({"subset": "3, sha256 a"}, ["subset=None", "subset='3, sha256 a'"]),
    ],
)
def test_a_state_of_other_data_is_rejected_with_both_values(
    change: dict[str, Any], values: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        sampler(**change).load_state_dict(sampler().state_dict())
    assert all(value in str(refused.value) for value in values)


def test_a_state_from_before_subsets_were_named_is_accepted() -> None:
    state = sampler().state_dict()
    del state["subset"]
    sampler(subset="3, sha256 a").load_state_dict(state)


def test_a_state_of_another_order_version_is_rejected() -> None:
    state = {**sampler().state_dict(), "order_version": 0}
    with pytest.raises(ConfigError, match="order_version=0"):
        sampler().load_state_dict(state)


@pytest.mark.parametrize("name", ["seed", "step"])
def test_an_incomplete_state_is_rejected(name: str) -> None:
    state = sampler().state_dict()
    del state[name]
    with pytest.raises(ConfigError, match=f"lacks '{name}'"):
        sampler().load_state_dict(state)


# -- epochs with max_steps ------------------------------------------------------------------------


def test_an_epoch_ends_after_max_steps() -> None:
    assert EpochPlan(103, 10, max_steps=4).steps == 4
    assert EpochPlan(103, 10, max_steps=40).steps == 11
    for size in (1, 3):
        read = epoch_of_world(size, max_steps=4)
        assert sorted(read) == sorted(list(sampler())[:40])
        ranks = [sampler(rank=rank, size=size, max_steps=4) for rank in range(size)]
        assert sum(map(len, ranks)) == 40
    with pytest.raises(ConfigError, match="max_steps is 0"):
        sampler(max_steps=0)


@pytest.mark.parametrize(
    ("before", "step", "now", "expected"),
    [
        (4, 2, 4, 2),
        (4, 2, 6, 2),  # the epoch continues
        (6, 5, 4, 4),  # the epoch ends immediately
        (4, 4, 6, 6),  # a complete epoch stays complete
        (None, 11, 6, 6),
        (4, 4, None, 11),
    ],
)
def test_a_resumed_job_may_change_max_steps(
    before: int | None, step: int, now: int | None, expected: int
) -> None:
    one, other = sampler(max_steps=before), sampler(max_steps=now)
    one.seek(Position(2, step))
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert other.position == Position(2, expected)
