"""A user's DataLoader in a changing world: the same loader, different batches."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    StackDataset,
    Subset,
    TensorDataset,
    get_worker_info,
)

from elastic.errors import ConfigError, TrainingError
from elastic.train.loader import BatchInfo, ElasticLoader, draws_nothing, shard, shard_by
from elastic.train.sampler import ElasticSampler, Position

N = 53


class Noisy(Dataset[tuple[int, float, float, float]]):
    """A dataset whose samples draw from the three generators that augmentations use."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, random.random(), float(np.random.rand()), float(torch.rand(()))


class Prefetcher:
    """A wrapper as found in training scripts: iterates a loader some batches ahead."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.mixup_enabled = True

    def __iter__(self) -> Iterator[Any]:
        ahead: list[Any] = []
        for batch in self.loader:
            ahead.append(batch)
            if len(ahead) > 2:
                yield ahead.pop(0)
        yield from ahead


def numbers(n: int = N) -> TensorDataset:
    return TensorDataset(torch.arange(n))


def loader(**options: Any) -> ElasticLoader:
    return ElasticLoader(DataLoader(numbers(), batch_size=4, shuffle=True), **options)


def read(one: ElasticLoader, rank: int, size: int) -> list[tuple[BatchInfo, list[int]]]:
    return [(info, batch[0].tolist()) for info, batch in one.batches(rank, size)]


def counted(batches: list[tuple[BatchInfo, list[int]]]) -> list[int]:
    return [index for info, data in batches if info.samples for index in data]


# -- the batches --------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_batches_match_their_info(micro_batch: int | None) -> None:
    one = loader(largest_world=3, micro_batch=micro_batch)
    everything: list[int] = []
    for rank in range(3):
        batches = read(one, rank, 3)
        for info, data in batches:
            assert len(data) == max(info.samples, 1)
            assert info.samples == 0 or tuple(data) == info.indices
            assert info.samples <= (micro_batch or 12)
        everything += counted(batches)
    assert sorted(everything) == list(range(N))


def test_batch_weights_sum_to_one() -> None:
    one = loader(global_batch=10, micro_batch=2)
    weights = [0.0] * len(one)
    micro_batches: list[set[int]] = [set() for _ in range(len(one))]
    for rank in range(3):
        for info, _ in read(one, rank, 3):
            weights[info.step] += info.weight * info.rank_weight
            micro_batches[info.step].add(info.micro_batches)
            assert info.is_last_micro_batch == (info.micro_batch == info.micro_batches - 1)
            assert info.is_last_step == (info.step == 5)
            assert info.global_samples == (3 if info.is_last_step else 10)
    assert weights == pytest.approx([1.0] * 6)
    assert all(len(counts) == 1 for counts in micro_batches)


def test_a_rank_without_samples_reads_one_with_weight_zero() -> None:
    one = loader(global_batch=13)  # the last step has one sample
    info, data = read(one, 1, 2)[-1]
    assert (info.samples, info.rank_samples, info.weight, info.indices) == (0, 0, 0.0, ())
    assert data == list(read(one, 0, 2)[-1][0].indices)


def test_the_world_may_change_between_steps() -> None:
    reference = counted(read(loader(global_batch=10), 0, 1))
    one = loader(global_batch=10)
    first = [read(one, rank, 3)[0][0].indices for rank in range(3)]
    one.advance()
    rest = [counted(read(one, rank, 2)) for rank in range(2)]
    assert [index for part in first for index in part] == reference[:10]
    assert sorted(rest[0] + rest[1]) == sorted(reference[10:])


def test_reading_does_not_move_the_position() -> None:
    one = loader(global_batch=10)
    read(one, 0, 1)
    assert one.position == Position(0, 0)
    one.seek(Position(0, 6))
    assert read(one, 0, 1) == []
    one.begin_epoch(0)
    assert one.position == Position(0, 6)
    one.begin_epoch(1)
    assert one.position == Position(1, 0)


def test_len_is_the_steps_per_epoch_in_every_world() -> None:
    one = loader(largest_world=2)
    assert len(one) == 7
    read(one, 0, 2)
    one.advance()
    assert len(one) == 7


def test_the_global_batch_defaults_to_that_of_the_largest_world() -> None:
    assert loader(largest_world=3).plan.global_batch == 12
    assert loader(largest_world=3, global_batch=20).plan.global_batch == 20


def test_set_epoch_is_ignored() -> None:
    one = loader()
    one.seek(Position(1, 3))
    one.sampler.set_epoch(7)
    assert one.position == Position(1, 3)
    assert isinstance(one.sampler, DistributedSampler)


def test_iterating_without_a_run_advances_through_epochs() -> None:
    one = loader(global_batch=10)
    first = [index for (batch,) in one for index in batch.tolist()]
    assert one.position == Position(0, 6)
    second = [index for (batch,) in one for index in batch.tolist()]
    assert sorted(first) == sorted(second) == list(range(N))
    assert first != second


def test_the_run_controls_iteration() -> None:
    def drive(one: ElasticLoader) -> Iterator[Any]:
        yield ("driven", len(one))

    assert list(loader(drive=drive)) == [("driven", 14)]


def test_another_loader_resumes_from_the_state() -> None:
    one, other = loader(global_batch=10), loader(global_batch=10)
    one.seek(Position(3, 2))
    other.load_state_dict(one.state_dict())
    assert counted(read(one, 0, 1)) == counted(read(other, 0, 1))
    with pytest.raises(ConfigError, match=r"global_batch=10, .* global_batch=20"):
        loader(global_batch=20).load_state_dict(one.state_dict())


def test_a_world_larger_than_the_global_batch_is_rejected() -> None:
    with pytest.raises(ConfigError, match="global batch of 2 is smaller than the world of 3"):
        loader(global_batch=2).batches(0, 3)


# -- settings of the user's loader ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "shuffle", "seed"),
    [
        (lambda data: DataLoader(data, batch_size=4), False, 7),
        (lambda data: DataLoader(data, batch_size=4, shuffle=True), True, 7),
        (lambda data: DataLoader(data, 4, sampler=DistributedSampler(data, 2, 0)), True, 0),
        (
            lambda data: DataLoader(
                data, 4, sampler=DistributedSampler(data, 2, 0, shuffle=False, seed=3)
            ),
            False,
            3,
        ),
        (
            lambda data: DataLoader(
                data, batch_sampler=BatchSampler(RandomSampler(data), 4, drop_last=False)
            ),
            True,
            7,
        ),
    ],
)
def test_the_order_is_that_of_the_users_loader(
    make: Callable[[Any], DataLoader[Any]], shuffle: bool, seed: int
) -> None:
    one = ElasticLoader(make(numbers()), seed=7)
    expected = ElasticSampler(numbers(), 1, 0, shuffle, seed, global_batch=4)
    assert counted(read(one, 0, 1)) == list(expected)


def test_an_elastic_sampler_determines_the_global_batch() -> None:
    own = ElasticSampler(numbers(), 1, 0, global_batch=20)
    one = ElasticLoader(DataLoader(numbers(), 5, sampler=own), largest_world=2)
    assert one.plan.global_batch == 20


def test_drop_last_is_preserved() -> None:
    given = DataLoader(numbers(), batch_size=10, shuffle=True, drop_last=True)
    one = ElasticLoader(given)
    assert len(one) == 5
    assert len(counted(read(one, 0, 1))) == 50


def test_the_users_loader_is_not_modified() -> None:
    given = DataLoader(numbers(), batch_size=10)
    one = ElasticLoader(given, global_batch=20)
    read(one, 1, 2)
    assert [len(batch) for (batch,) in given] == [10, 10, 10, 10, 10, 3]
    assert one.batch_size == 10 and one.dataset is given.dataset


def test_collate_function_and_subclass_are_preserved() -> None:
    class Doubling(DataLoader[Any]):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                yield batch * 2

    def collate(samples: list[tuple[torch.Tensor]]) -> torch.Tensor:
        return torch.stack([sample[0] for sample in samples]) + 1000

    one = ElasticLoader(Doubling(numbers(), batch_size=4, collate_fn=collate))
    info, batch = next(one.batches(0, 1))
    assert batch.tolist() == [2 * (index + 1000) for index in info.indices]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


@pytest.mark.parametrize(
    ("given", "named", "remedy"),
    [
        (lambda: DataLoader(Stream(), 4), "Stream is an IterableDataset", "`run.begin()`"),
        (lambda: DataLoader(Stream(), batch_size=None), "IterableDataset", "__getitem__"),
        (lambda: Prefetcher(DataLoader(numbers())), "Prefetcher", "dataloader=inner"),
        (lambda: DataLoader(numbers(0), 4), "empty", "path"),
    ],
)
def test_loaders_that_cannot_be_sharded_are_rejected_with_a_remedy(
    given: Callable[[], Any], named: str, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=named) as refused:
        ElasticLoader(given())
    assert remedy in refused.value.hint
    assert "run.generate" not in refused.value.hint


def test_a_micro_batch_of_zero_is_rejected() -> None:
    with pytest.raises(ConfigError, match="micro_batch=0 is below 1"):
        loader(micro_batch=0)


# -- wrapped loaders ------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_a_wrapped_loader_yields_this_ranks_batches(workers: int) -> None:
    inner = DataLoader(numbers(), batch_size=4, shuffle=True, num_workers=workers)
    one = ElasticLoader(Prefetcher(inner), dataloader=inner, global_batch=10)
    assert [read(one, rank, 2) for rank in range(2)] == [
        read(loader(global_batch=10), rank, 2) for rank in range(2)
    ]
    one.advance()
    assert [info.step for info, _ in read(one, 0, 3)] == [1, 2, 3, 4, 5]
    assert one.mixup_enabled and inner.batch_size == 4
    assert len(inner) == len(one)
    inner.sampler.set_epoch(5)  # type: ignore[attr-defined]
    assert one.position == Position(0, 1)


def test_a_wrapped_loader_may_be_passed_again() -> None:
    inner = DataLoader(numbers(), batch_size=4, shuffle=True)
    ElasticLoader(Prefetcher(inner), dataloader=inner)
    again = ElasticLoader(Prefetcher(inner), dataloader=inner, global_batch=10)
    assert read(again, 0, 1) == read(loader(global_batch=10), 0, 1)


@pytest.mark.parametrize(
    ("wrap", "named"),
    [
        (lambda inner: list(DataLoader(numbers(), 10)), "does not read"),
        (lambda inner: _Changed(inner, lambda batches: batches[:2]), "ended before step 2"),
        (lambda inner: _Changed(inner, lambda batches: batches * 2), "continued after the last"),
    ],
)
def test_a_wrapper_that_changes_the_batches_is_detected(
    wrap: Callable[[DataLoader[Any]], Any], named: str
) -> None:
    inner = DataLoader(numbers(), batch_size=10)
    one = ElasticLoader(wrap(inner), dataloader=inner)
    with pytest.raises(TrainingError, match=named):
        read(one, 0, 1)


class _Changed:
    def __init__(self, inner: DataLoader[Any], change: Callable[[list[Any]], list[Any]]) -> None:
        self._inner, self._change = inner, change

    def __iter__(self) -> Iterator[Any]:
        return iter(self._change(list(self._inner)))


# -- data workers and randomness ------------------------------------------------------------------


def test_persistent_workers_follow_the_world_and_the_epoch() -> None:
    given = DataLoader(
        numbers(), 4, shuffle=True, num_workers=1, persistent_workers=True, prefetch_factor=4
    )
    one, reference = ElasticLoader(given, global_batch=10), loader(global_batch=10)
    for position, rank, size in [(Position(0, 0), 0, 2), (Position(0, 1), 2, 3)]:
        for this in (one, reference):
            this.seek(position)
        left_early = one.batches(rank, size)
        next(left_early)  # the worker has prefetched further, for the previous world
        assert read(one, rank, size) == read(reference, rank, size)
    for this in (one, reference):
        this.begin_epoch(1)
    assert read(one, 0, 1) == read(reference, 0, 1)


@pytest.mark.parametrize("in_place", [False, True])
def test_running_persistent_workers_discard_the_old_batches(in_place: bool) -> None:
    given = DataLoader(numbers(), 4, shuffle=True, num_workers=1, persistent_workers=True)
    assert len(next(iter(given))[0]) == 4
    one = ElasticLoader(given, dataloader=given if in_place else None, global_batch=10)
    assert read(one, 1, 2) == read(loader(global_batch=10), 1, 2)


def test_persistent_workers_start_once() -> None:
    given = DataLoader(_WorkerPids(), 4, num_workers=1, persistent_workers=True)
    one = ElasticLoader(given)
    pids = {int(pid) for _ in range(2) for _, batch in one.batches(0, 1) for pid in batch}
    assert len(pids) == 1


class _WorkerPids(Dataset[int]):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> int:
        info = get_worker_info()
        assert info is not None and isinstance(info.dataset, _WorkerPids)
        return os.getpid()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: Subset(data, range(N))])
def test_randomness_depends_only_on_the_sample(workers: int, wrap: Callable[[Any], Any]) -> None:
    """Neither on the process that reads it, nor the world, nor earlier reads."""

    def noise(size: int, position: Position, workers: int = 0) -> dict[int, tuple[float, ...]]:
        one = ElasticLoader(
            DataLoader(wrap(Noisy()), 5, shuffle=True, num_workers=workers), global_batch=10
        )
        one.seek(position)
        return {
            sample[0]: sample[1:]
            for rank in range(size)
            for info, batch in one.batches(rank, size)
            if info.samples
            for sample in zip(*(column.tolist() for column in batch), strict=True)
        }

    alone = noise(1, Position(0, 0))
    assert noise(3, Position(0, 0), workers) == alone
    resumed = noise(2, Position(0, 3), workers)
    assert len(resumed) == N - 30
    assert resumed.items() <= alone.items()
    assert len({draw for draws in alone.values() for draw in draws}) == 3 * N
    next_epoch = noise(1, Position(1, 0))
    assert not set(next_epoch.values()) & set(alone.values())


@pytest.mark.parametrize("workers", [0, 1])
def test_reading_does_not_advance_the_processs_generators(workers: int) -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    one = ElasticLoader(DataLoader(Noisy(), 5, shuffle=True, num_workers=workers))
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    undisturbed = [draw() for _ in range(4)]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    drawn = [draw()]
    batches = one.batches(0, 1)
    for _ in range(2):
        next(batches)
        drawn.append(draw())
    list(batches)
    assert [*drawn, draw()] == undisturbed


def test_datasets_that_are_only_indexed_draw_no_random_numbers() -> None:
    data = numbers()
    plain: Dataset[Any]
    for plain in (data, Subset(data, range(9)), ConcatDataset([data, data]), StackDataset(data)):
        assert draws_nothing(DataLoader(plain, 5))
    assert draws_nothing(DataLoader(StackDataset(x=Subset(data, range(9))), 5))


def test_custom_code_is_assumed_to_draw_random_numbers() -> None:
    class Mine(TensorDataset):
        pass

    class MyLoader(DataLoader[Any]):
        pass

    data = numbers()
    for drawing in (Noisy(), Mine(*data.tensors), Subset(Noisy(), range(9))):
        assert not draws_nothing(DataLoader(drawing, 5))
    assert not draws_nothing(DataLoader(ConcatDataset([data, Noisy()]), 5))
    assert not draws_nothing(DataLoader(data, 5, collate_fn=lambda samples: samples))
    assert not draws_nothing(MyLoader(data, 5))


def test_a_wrapper_draws_the_same_random_numbers_again() -> None:
    class Jitter:
        """Adds noise to batches of a dataset that draws no random numbers itself."""

        def __init__(self, loader: DataLoader[Any]) -> None:
            self.loader = loader

        def __iter__(self) -> Iterator[Any]:
            for (batch,) in self.loader:
                yield batch, float(torch.rand(()))

    def noise(skip: int) -> list[float]:
        inner = DataLoader(numbers(), 5)
        one = ElasticLoader(Jitter(inner), dataloader=inner)
        one.seek(Position(0, skip))
        torch.manual_seed(skip)
        return [drawn for _, (_, drawn) in one.batches(0, 1)]

    assert noise(3) == noise(0)[3:]


def test_an_unreadable_sample_does_not_advance_the_generators() -> None:
    class Broken(Noisy):
        def __getitem__(self, index: int) -> tuple[int, float, float, float]:
            raise OSError("bad block")

    torch.manual_seed(1)
    undisturbed = float(torch.rand(()))
    torch.manual_seed(1)
    with pytest.raises(OSError, match="bad block"):
        next(ElasticLoader(DataLoader(Broken(), 5)).batches(0, 1))
    assert float(torch.rand(())) == undisturbed


# -- evaluation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 60])
@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"drop_last": True}])
def test_evaluation_reads_every_sample_once(size: int, options: dict[str, bool]) -> None:
    given: DataLoader[Any] = DataLoader(numbers(), batch_size=4, **options)  # type: ignore[arg-type]
    parts = [[batch.tolist() for (batch,) in shard(given, rank, size)] for rank in range(size)]
    assert [index for part in parts for batch in part for index in batch] == list(range(N))
    sizes = [sum(map(len, part)) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert max(len(batch) for part in parts for batch in part) <= 4
    assert [len(shard(given, rank, size)) for rank in range(size)] == [len(part) for part in parts]


def test_evaluation_follows_the_world() -> None:
    world = (0, 1)
    part = shard_by(DataLoader(numbers(), batch_size=4), lambda: world)
    assert sum(len(batch) for (batch,) in part) == N
    world = (1, 2)
    assert sum(len(batch) for (batch,) in part) == N // 2


@pytest.mark.parametrize("samples", [3, 4, 5, 7, 16, 17, 53])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 100])
def test_ranks_of_a_sharded_model_evaluate_the_same_number_of_batches(
    samples: int, batch_size: int
) -> None:
    given: DataLoader[Any] = DataLoader(TensorDataset(torch.arange(samples)), batch_size)
    ranks = [shard_by(given, partial(pair, rank, 3), is_even=lambda: True) for rank in range(3)]
    parts = [[batch.tolist() for (batch,) in part] for part in ranks]
    assert [index for part in parts for batch in part for index in batch] == list(range(samples))
    assert len({len(part) for part in parts} | {len(loader) for loader in ranks}) == 1
    sizes = [len(batch) for part in parts for batch in part]
    assert min(sizes) >= 1 and max(sizes) <= max(batch_size, 2)


def pair(rank: int, size: int) -> tuple[int, int]:
    return rank, size


def test_evaluation_of_a_sharded_model_rejects_a_rank_without_samples() -> None:
    few: DataLoader[Any] = DataLoader(TensorDataset(torch.arange(2)), 4)
    with pytest.raises(ConfigError, match="2 samples for 3 ranks"):
        list(shard_by(few, partial(pair, 2, 3), is_even=lambda: True))
    items: DataLoader[Any] = DataLoader(TensorDataset(torch.arange(4)), batch_size=None)
    with pytest.raises(ConfigError, match="4 batches of the dataset for 3 ranks"):
        list(shard_by(items, partial(pair, 2, 3), is_even=lambda: True))
    nothing: DataLoader[Any] = DataLoader(TensorDataset(torch.arange(0)), 4)
    assert list(shard_by(nothing, partial(pair, 2, 3), is_even=lambda: True)) == []


def test_evaluation_rejects_loaders_that_cannot_be_sharded() -> None:
    with pytest.raises(ConfigError, match="IterableDataset"):
        shard(DataLoader(Stream(), 4), 0, 1)
    with pytest.raises(ConfigError, match="rank 2"):
        shard(DataLoader(numbers(), 4), 2, 2)


# -- the samples of a dataset ---------------------------------------------------------------------


class Growing(Dataset[int]):
    def __init__(self) -> None:
        self.samples = list(range(20))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> int:
        return self.samples[index]


def test_a_dataset_that_grows_is_refused() -> None:
    dataset = Growing()
    loader = ElasticLoader(DataLoader(dataset, batch_size=4))
    list(loader)
    dataset.samples.append(20)
    with pytest.raises(
        ConfigError, match=r"had 20 samples when run\.loader was called, and now has"
    ):
        list(loader)


def test_a_position_among_other_samples_of_a_split_is_refused() -> None:
    one, other = (
        ElasticLoader(DataLoader(Subset(Growing(), indices), batch_size=2))
        for indices in ([1, 2, 3], [1, 2, 4])
    )
    with pytest.raises(ConfigError, match="saved with subset=") as refused:
        other.load_state_dict(one.state_dict())
    assert "random_split(dataset, lengths, generator=" in refused.value.hint
    one.load_state_dict(one.state_dict())
