"""torch's samplers over a changing world: their draws, as functions of (seed, epoch, position)."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from elastic.errors import ConfigError
from elastic.train.loader import ElasticLoader, shard
from elastic.train.sampler import Position

N = 53
PART = [50, 3, 17, 8, 29, 41, 0, 12, 33, 26, 5]
WEIGHTS = [0.0, 1.0, 0.5, 8.0] * 13 + [3.0]


def numbers(n: int = N) -> TensorDataset:
    return TensorDataset(torch.arange(n))


SAMPLERS: dict[str, Callable[[Any], Any]] = {
    "part": lambda data: SubsetRandomSampler(PART),
    "weighted": lambda data: WeightedRandomSampler(WEIGHTS, 40),
    "weighted, each once": lambda data: WeightedRandomSampler(WEIGHTS, 30, replacement=False),
    "with replacement": lambda data: RandomSampler(data, replacement=True),
    "fewer": lambda data: RandomSampler(data, num_samples=20),
    "more": lambda data: RandomSampler(data, num_samples=130),
    "more, with replacement": lambda data: RandomSampler(data, replacement=True, num_samples=130),
    "first": lambda data: SequentialSampler(range(20)),
    "list": lambda data: list(PART),
}


def loader(sampler: str, *, global_batch: int = 10, seed: int = 0, **options: Any) -> ElasticLoader:
    data = numbers()
    given = DataLoader(data, batch_size=4, sampler=SAMPLERS[sampler](data))
    return ElasticLoader(given, global_batch=global_batch, seed=seed, **options)


def read(one: ElasticLoader, rank: int = 0, size: int = 1) -> list[list[int]]:
    """This rank's samples, step by step."""
    return [b.tolist() if info.samples else [] for info, (b,) in one.batches(rank, size)]


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    return [item for part in lists for item in part]


def epoch(one: ElasticLoader, number: int = 0) -> list[int]:
    one.begin_epoch(number)
    return [index for step in read(one) for index in step]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_world_reads_the_same_steps_of_a_draw(sampler: str) -> None:
    reference = read(loader(sampler))
    for size in (2, 3, 7):
        ranks = [read(loader(sampler), rank, size) for rank in range(size)]
        steps = [flat(parts) for parts in zip(*ranks, strict=True)]
        assert steps == reference


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_draw_continues_in_a_new_process_and_another_world(sampler: str) -> None:
    one = loader(sampler)
    one.begin_epoch(3)
    reference = read(one)
    one.advance()
    resumed = [loader(sampler) for _ in range(2)]
    for this in resumed:
        this.load_state_dict(json.loads(json.dumps(one.state_dict())))
        assert this.position == Position(3, 1)
    ranks = [read(this, rank, 2) for rank, this in enumerate(resumed)]
    assert [flat(parts) for parts in zip(*ranks, strict=True)] == reference[1:]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_epochs_are_as_long_as_the_sampler(sampler: str) -> None:
    assert len(epoch(loader(sampler))) == len(SAMPLERS[sampler](numbers()))
    assert len(loader(sampler)) == -(-len(SAMPLERS[sampler](numbers())) // 10)


@pytest.mark.parametrize("sampler", sorted(SAMPLERS.keys() - {"first", "list"}))
def test_each_epoch_and_each_seed_has_its_own_draw(sampler: str) -> None:
    one = loader(sampler)
    first = epoch(one)
    assert epoch(one, 1) != first
    assert epoch(one, 0) == first
    assert epoch(loader(sampler, seed=1)) != first


@pytest.mark.parametrize("sampler", ["first", "list"])
def test_a_given_order_is_preserved(sampler: str) -> None:
    expected = {"first": list(range(20)), "list": PART}[sampler]
    assert epoch(loader(sampler)) == epoch(loader(sampler), 1) == expected


def test_a_subset_is_read_once_per_epoch() -> None:
    assert sorted(epoch(loader("part"))) == sorted(epoch(loader("part"), 4)) == sorted(PART)


def test_an_array_of_indices_is_treated_as_a_list() -> None:
    for given in (np.array(PART), torch.tensor(PART), tuple(PART), list(torch.tensor(PART))):
        one = ElasticLoader(DataLoader(numbers(), batch_size=4, sampler=given))
        assert epoch(one) == PART


def test_draws_with_num_samples_are_prefixes_of_epochs() -> None:
    full_epoch = epoch(ElasticLoader(DataLoader(numbers(), batch_size=4, shuffle=True)))
    assert epoch(loader("fewer")) == full_epoch[:20]
    more = epoch(loader("more"))
    assert more[:N] == full_epoch
    assert sorted(more[N : 2 * N]) == list(range(N)) and more[N : 2 * N] != full_epoch
    assert len(set(more[2 * N :])) == 130 - 2 * N


# -- frequency ------------------------------------------------------------------------------------


def drawn(sampler: Any, epochs: int, n: int) -> list[list[int]]:
    one = ElasticLoader(DataLoader(numbers(n), batch_size=100, sampler=sampler))
    return [epoch(one, number) for number in range(epochs)]


def deviation(counts: list[int], expected: list[float]) -> float:
    """How many standard deviations chi-squared lies above its mean."""
    chi_squared = sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))
    freedom = len(counts) - 1
    return float((chi_squared - freedom) / np.sqrt(2 * freedom))


def test_samples_are_drawn_in_proportion_to_their_weights() -> None:
    weights = [0.0, 1.0, 0.25, 4.0, 2.0, 0.0]
    counts = Counter(flat(drawn(WeightedRandomSampler(weights, 2000), 10, 6)))
    assert counts.keys() == {1, 2, 3, 4}
    expected = [20000 * weights[index] / sum(weights) for index in (1, 2, 3, 4)]
    assert abs(deviation([counts[index] for index in (1, 2, 3, 4)], expected)) < 4


def test_weighted_draws_without_replacement_match_sequential_drawing() -> None:
    weights = [1.0, 2.0, 0.0, 5.0]
    epochs = drawn(WeightedRandomSampler(weights, 2, replacement=False), 4000, 4)
    assert all(len(set(pair)) == 2 and 2 not in pair for pair in epochs)
    pairs = [(a, b) for a in (0, 1, 3) for b in (0, 1, 3) if a != b]
    expected = [4000 * weights[a] / 8 * weights[b] / (8 - weights[a]) for a, b in pairs]
    counts = Counter((a, b) for a, b in epochs)
    assert abs(deviation([counts[pair] for pair in pairs], expected)) < 4


def test_with_replacement_all_samples_are_equally_likely() -> None:
    given = RandomSampler(numbers(20), replacement=True, num_samples=2000)
    counts = Counter(flat(drawn(given, 10, 20)))
    assert abs(deviation([counts[index] for index in range(20)], [1000.0] * 20)) < 4


class Noise(Dataset[tuple[int, float]]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, random.random()


def test_a_repeated_sample_has_a_new_augmentation() -> None:
    """As in plain torch, and the same in every world."""

    def noise(size: int) -> list[tuple[int, float]]:
        given = DataLoader(Noise(), batch_size=4, sampler=WeightedRandomSampler(WEIGHTS, 60))
        one = ElasticLoader(given, global_batch=10)
        found = []
        for rank in range(size):
            for info, (indices, draws) in one.batches(rank, size):
                found += [
                    (info.step, *pair)
                    for pair in zip(indices.tolist(), draws.tolist(), strict=True)
                ]
        return [(index, draw) for _, index, draw in sorted(found, key=lambda at: at[0])]

    alone = noise(1)
    assert len({index for index, _ in alone}) < 60
    assert len({draw for _, draw in alone}) == 60
    assert noise(2) == alone


# -- rejected -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampler", "named", "remedy"),
    [
        (SubsetRandomSampler([1, 60]), "has index 60, but the dataset has 53 samples", "from 0"),
        (SubsetRandomSampler([]), "SubsetRandomSampler is empty", "split"),
        (["a.png", "b.png"], "list does not contain sample indices", "list of integers"),
        ([1.0, 2.5], "float64 values of shape", "list of integers"),
        ([[1, 2], [3, 4]], r"shape \(2, 2\)", "flat list"),
        ([-1], "list has index -1", "from 0"),
        (SequentialSampler(range(60)), "draws from 60 samples, but the dataset has 53", "same"),
        (RandomSampler(range(60), num_samples=3), "draws from 60 samples", "same"),
        (WeightedRandomSampler([1.0] * 60, 3), "draws from 60 samples", "same"),
        (WeightedRandomSampler([0.0, 0.0], 3), "the weights are invalid", "above 0"),
        (WeightedRandomSampler([1.0, -1.0], 3), "the weights are invalid", "at least 0"),
        (WeightedRandomSampler([1.0, float("nan")], 3), "the weights are invalid", "finite"),
        (
            WeightedRandomSampler([1.0, 0.0, 2.0], 3, replacement=False),
            "draws 3 samples without replacement, but only 2 have",
            "num_samples=2",
        ),
    ],
)
def test_invalid_samplers_are_rejected(sampler: Any, named: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=named) as refused:
        ElasticLoader(DataLoader(numbers(), batch_size=4, sampler=sampler))
    assert remedy in refused.value.hint


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (lambda: SubsetRandomSampler(PART), lambda: SubsetRandomSampler([1, *PART[1:]])),
        (lambda: SubsetRandomSampler(PART), lambda: list(PART)),
        (lambda: WeightedRandomSampler(WEIGHTS, 40), lambda: WeightedRandomSampler([1.0], 40)),
        (lambda: RandomSampler(range(40)), lambda: SequentialSampler(range(40))),
        (lambda: SequentialSampler(range(40)), lambda: WeightedRandomSampler(WEIGHTS, 40)),
        (
            lambda: RandomSampler(range(40), num_samples=20),
            lambda: RandomSampler(range(40), num_samples=20, replacement=True),
        ),
    ],
)
def test_a_position_of_another_draw_is_rejected(
    before: Callable[[], Any], now: Callable[[], Any]
) -> None:
    one, other = (
        ElasticLoader(DataLoader(numbers(), batch_size=4, sampler=make())) for make in (before, now)
    )
    with pytest.raises(ConfigError, match=r"sampler=.* this run has sampler=|shuffle=True"):
        other.load_state_dict(one.state_dict())


def test_a_split_that_differs_between_processes_is_rejected() -> None:
    """Whether the state is that of another rank or of a checkpoint."""
    one, other = (
        ElasticLoader(
            DataLoader(numbers(), 4, sampler=SubsetRandomSampler(torch.randperm(N)[:40].tolist()))
        )
        for _ in range(2)
    )
    with pytest.raises(ConfigError, match="SubsetRandomSampler of 40, sha256") as refused:
        other.load_state_dict(one.state_dict())
    assert "manual_seed" in refused.value.hint


def test_a_sampler_that_changes_is_rejected_at_the_next_epoch() -> None:
    weighted, part = WeightedRandomSampler(WEIGHTS, 40), SubsetRandomSampler(list(PART))
    both = [ElasticLoader(DataLoader(numbers(), 4, sampler=given)) for given in (weighted, part)]
    for one in both:
        epoch(one)
    weighted.weights[3] = 0.5
    part.indices[0] = 1  # type: ignore[index]
    for one in both:
        with pytest.raises(ConfigError, match=r"has changed since run\.loader") as refused:
            epoch(one, 1)
        assert "weight the losses" in refused.value.hint


def test_states_of_older_releases_load_into_plain_loaders() -> None:
    plain = ElasticLoader(DataLoader(numbers(), batch_size=4, shuffle=True))
    plain.seek(Position(2, 3))
    old = plain.state_dict()
    for name in ("sampler", "max_steps", "follows"):
        del old[name]
    again = ElasticLoader(DataLoader(numbers(), batch_size=4, shuffle=True))
    again.load_state_dict(old)
    assert again.position == Position(2, 3)
    with pytest.raises(ConfigError, match="sampler=None"):
        ElasticLoader(
            DataLoader(numbers(), batch_size=4, sampler=RandomSampler(numbers(), True))
        ).load_state_dict(old)


# -- batch_size=None ------------------------------------------------------------------------------


class Batches(Dataset[torch.Tensor]):
    """Each item is a batch already, of its own size."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((index + 1,), index) + int(random.random() < 0)


@pytest.mark.parametrize("workers", [0, 1])
def test_prebatched_items_are_distributed_one_by_one(workers: int) -> None:
    def items(size: int) -> list[list[int]]:
        given = DataLoader(Batches(), batch_size=None, shuffle=True, num_workers=workers)
        one = ElasticLoader(given, largest_world=2)
        assert one.plan.global_batch == 2
        read = []
        for rank in range(size):
            for info, batch in one.batches(rank, size):
                assert info.micro_batches == (1 if info.is_last_step else 2 // size)
                if info.samples:
                    assert (info.samples, len(batch)) == (1, int(batch[0]) + 1)
                    read.append((info.step, batch.tolist()))
        return [batch for _, batch in sorted(read, key=lambda at: at[0])]

    assert items(1) == items(2)
    assert sorted(map(len, items(1))) == list(range(1, 10))


def test_prebatched_items_work_in_a_loader_changed_in_place() -> None:
    inner = DataLoader(Batches(), batch_size=None)
    ElasticLoader(inner, dataloader=inner)
    again = ElasticLoader(inner, dataloader=inner)
    assert [int(batch[0]) for _, batch in again.batches(0, 1)] == list(range(9))


def test_prebatched_items_cannot_be_split() -> None:
    with pytest.raises(ConfigError, match=r"micro_batch is 2 .* batch_size=None"):
        ElasticLoader(DataLoader(Batches(), batch_size=None), micro_batch=2)


class ReadByList(Dataset[torch.Tensor]):
    """Reads many samples at once, as datasets in databases and arrays do."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, indices: Any) -> torch.Tensor:
        assert isinstance(indices, list)
        return torch.tensor(list(indices)) * 2


def test_a_dataset_may_receive_lists_of_indices() -> None:
    """``sampler=BatchSampler(…), batch_size=None``, as in torch's documentation."""
    batches = BatchSampler(RandomSampler(range(N)), batch_size=4, drop_last=True)
    given: DataLoader[Any] = DataLoader(ReadByList(), batch_size=None, sampler=batches)
    one = ElasticLoader(given, largest_world=2)
    assert (one.plan.global_batch, len(one)) == (8, 6)
    read = {}
    for rank in range(2):
        for info, batch in one.batches(rank, 2):
            assert batch.tolist() == [2 * index for index in info.indices]
            read[info.step, rank] = info.indices
    assert len(read) == 12
    evaluated = [batch.tolist() for rank in range(2) for batch in shard(given, rank, 2)]
    assert flat(evaluated) == [2 * index for index in range(N)]
    assert max(map(len, evaluated)) == 4


# -- evaluation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_evaluation_reads_each_sample_of_the_sampler_once(sampler: str) -> None:
    data = numbers()
    given = DataLoader(data, batch_size=4, sampler=SAMPLERS[sampler](data))
    parts = [[batch.tolist() for (batch,) in shard(given, rank, 3)] for rank in range(3)]
    expected = {"part": PART, "list": PART, "first": list(range(20))}.get(sampler, list(range(N)))
    assert flat(flat(parts)) == expected
    assert [len(shard(given, rank, 3)) for rank in range(3)] == [len(part) for part in parts]


def test_evaluation_distributes_prebatched_items() -> None:
    def sizes(rank: int) -> Iterator[int]:
        return (len(batch) for batch in shard(DataLoader(Batches(), batch_size=None), rank, 2))

    assert [*sizes(0), *sizes(1)] == list(range(1, 10))
