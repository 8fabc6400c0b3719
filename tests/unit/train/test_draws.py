"""torch's samplers over a changing world: their draws, as functions of (seed, epoch, position)."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from elastic.errors import ConfigError
from elastic.train.loader import ElasticLoader, same_shares, shard
from elastic.train.sampler import Position, rank_samples

N = 53
PART = [50, 3, 17, 8, 29, 41, 0, 12, 33, 26, 5]
WEIGHTS = [0.0, 1.0, 0.5, 8.0] * 13 + [3.0]


def numbers(n: int = N) -> TensorDataset:
    return TensorDataset(torch.arange(n))


class LongestFirst(Sampler[int]):
    """Groups samples of similar length, shuffled by torch's default generator."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(len(self.lengths)).tolist()
        chunks = [order[i : i + 20] for i in range(0, len(order), 20)]
        return (index for part in chunks for index in sorted(part, key=self.lengths.__getitem__))


class Shuffled(Sampler[int]):
    """Shuffles its own list in place, with a generator of its own."""

    def __init__(self) -> None:
        self.indices, self.rng = list(PART), random.Random(5)

    def __iter__(self) -> Iterator[int]:
        self.rng.shuffle(self.indices)
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


class Counting(Sampler[int]):
    """Counts its own iterations, which is its only source of an order."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng(self.epoch).permutation(N)
        self.epoch += 1
        yield from order

    def __len__(self) -> int:
        return N


class Weighted(WeightedRandomSampler):
    """torch's sampler, but drawn by numpy, as for more weights than torch.multinomial takes."""

    def __iter__(self) -> Iterator[int]:
        p = self.weights.numpy()
        return iter(np.random.choice(len(p), self.num_samples, p=p / p.sum()))


LENGTHS = [(7 * index) % 19 for index in range(N)]

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
    "own, by length": lambda data: LongestFirst(LENGTHS),
    "own, in place": lambda data: Shuffled(),
    "own, counting": lambda data: Counting(),
    "own, weighted": lambda data: Weighted(WEIGHTS, 40),
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
    if sampler != "own, counting":  # its author's seed
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


# -- samplers of one's own ------------------------------------------------------------------------


def test_set_epoch_is_called_on_a_sampler_of_ones_own() -> None:
    class ByEpoch(Sampler[int]):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            generator = torch.Generator().manual_seed(3 + self.epoch)
            return iter(torch.randperm(N, generator=generator).tolist())

    given = ByEpoch()
    one = ElasticLoader(DataLoader(numbers(), 4, sampler=given))
    given.set_epoch(7)  # a call of the script may stay
    expected = torch.randperm(N, generator=torch.Generator().manual_seed(5)).tolist()
    assert epoch(one, 2) == expected


def test_an_own_sampler_is_never_iterated_and_leaves_the_generators_alone() -> None:
    given = Counting()
    torch.manual_seed(11)
    expected = torch.rand(3).tolist()
    torch.manual_seed(11)
    epoch(ElasticLoader(DataLoader(numbers(), 4, sampler=given)), 2)
    assert given.epoch == 0
    assert torch.rand(3).tolist() == expected


def test_datasets_and_models_inside_a_sampler_are_not_copied() -> None:
    class Unique(TensorDataset):
        def __deepcopy__(self, memo: object) -> None:
            raise AssertionError

    class OverData(Sampler[int]):
        def __init__(self, data: Any) -> None:
            self.parts = {"data": data}

        def __iter__(self) -> Iterator[int]:
            return iter(range(0, len(self.parts["data"]), 2))

    data = Unique(torch.arange(N))
    other = Unique(torch.arange(N))
    for held in (data, other):
        assert epoch(ElasticLoader(DataLoader(data, 4, sampler=OverData(held)))) == [
            *range(0, N, 2)
        ]


class Yields(Sampler[Any]):
    def __init__(self, values: Callable[[], Iterable[Any]], **attributes: Any) -> None:
        self.values = values
        self.__dict__.update(attributes)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())


def times_of_day() -> Iterator[int]:
    yield from (time.perf_counter_ns() % N for _ in range(20))


def endless() -> Iterator[int]:
    while True:
        yield 0


@pytest.mark.parametrize(
    ("sampler", "named", "remedy"),
    [
        (Yields(times_of_day), "yields other indices each time", "time"),
        (Yields(lambda: [1, N]), "has index 53, but the dataset has 53 samples", "from 0"),
        (Yields(lambda: [1, 2.5]), "does not contain sample indices", "integers"),
        (Yields(list), "is empty", "chooses"),
        (Yields(endless), "has not ended after 848 samples", "len"),
        (Yields(lambda: [1], num_replicas=2), "divides the samples among 2 ranks", "rank=0"),
        (Yields(lambda: [1], file=Path(__file__).open()), "cannot be copied", "open file"),  # noqa: SIM115
    ],
)
def test_samplers_whose_order_cannot_be_repeated_are_refused(
    sampler: Any, named: str, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=named) as refused:
        ElasticLoader(DataLoader(numbers(), batch_size=4, sampler=sampler))
    assert remedy in refused.value.hint


def test_a_sampler_that_follows_the_training_is_rejected_at_the_next_epoch() -> None:
    hard = [1, 2, 3]
    given = Yields(lambda: hard)
    one = ElasticLoader(DataLoader(numbers(), 4, sampler=given))
    assert epoch(one) == hard
    hard[0] = 9
    with pytest.raises(ConfigError, match=r"has changed since run\.loader"):
        epoch(one, 1)


def test_a_sampler_that_depends_on_the_rank_is_rejected() -> None:
    one, other = (
        ElasticLoader(DataLoader(numbers(), 4, sampler=Yields(partial(range, rank, N, 2))))
        for rank in range(2)
    )
    with pytest.raises(ConfigError, match="saved with sampler='Yields of 27") as refused:
        other.load_state_dict(one.state_dict())
    assert "must not depend on the rank" in refused.value.hint


def test_an_epoch_of_another_length_is_rejected() -> None:
    class Growing(Counting):
        def __iter__(self) -> Iterator[int]:
            self.epoch += 1
            return iter(range(self.epoch))

    one = ElasticLoader(DataLoader(numbers(), 4, sampler=Growing()))
    with pytest.raises(ConfigError, match="yields 3 samples in epoch 2, but 1 in epoch 0"):
        epoch(one, 2)


# -- batch samplers -------------------------------------------------------------------------------


class Buckets(Sampler[list[int]]):
    """Batches of samples of the same length, of different sizes, in a random order."""

    def __init__(self, largest: int = 4) -> None:
        self.largest = largest

    def __iter__(self) -> Iterator[list[int]]:
        batches = []
        for length in sorted(set(LENGTHS)):
            members = [index for index in range(N) if LENGTHS[index] == length]
            random.shuffle(members)
            batches += [members[i : i + self.largest] for i in range(0, len(members), self.largest)]
        random.shuffle(batches)
        return iter(batches)


COUNT = 19  # batches, of two or three samples


class Slow(BatchSampler):
    """A subclass of torch's: batches of four in a random order, reversed."""

    def __init__(self) -> None:
        super().__init__(RandomSampler(range(N)), 4, drop_last=False)

    def __iter__(self) -> Iterator[list[int]]:
        return (batch[::-1] for batch in super().__iter__())


def bucketed(**options: Any) -> ElasticLoader:
    return ElasticLoader(DataLoader(numbers(), batch_sampler=Buckets()), **options)


def test_the_batches_of_a_batch_sampler_are_never_divided() -> None:
    one = bucketed(largest_world=3, micro_batch=1)
    assert (one.plan.global_batch, len(one)) == (3, 7)
    for size in (1, 2, 3):
        batches = [
            batch.tolist()
            for rank in range(size)
            for info, (batch,) in one.batches(rank, size)
            if info.samples
        ]
        assert len(batches) == COUNT
        assert all(len({LENGTHS[index] for index in batch}) == 1 for batch in batches)
        assert sorted(flat(batches)) == list(range(N))


@pytest.mark.parametrize("micro_batch", [None, 1, 2])
def test_weights_are_in_proportion_to_the_samples_of_batches(micro_batch: int | None) -> None:
    """So that a mean over the samples of a step is the same in every world."""
    one = bucketed(global_batch=4, micro_batch=micro_batch)
    for size in (1, 2, 3):
        weights = Counter[int]()
        for rank in range(size):
            for info, (batch,) in one.batches(rank, size):
                if info.samples:
                    assert len(batch) == info.samples
                    weight = info.weight * info.rank_weight
                    assert weight == pytest.approx(info.samples / info.global_samples)
                    weights[info.step] += weight  # type: ignore[assignment]
        assert list(weights.values()) == pytest.approx([1.0] * 5)


def test_a_rank_gets_its_batches_of_a_step_as_one() -> None:
    """Unless the loader has micro-batches: a loop over the loader has one batch in each step."""
    alone = bucketed(global_batch=3, micro_batch=1)
    batches = [batch.tolist() for _, (batch,) in alone.batches(0, 1)]
    steps = [flat(batches[i : i + 3]) for i in range(0, COUNT, 3)]
    assert read(bucketed(global_batch=3)) == steps
    ranks = [read(bucketed(global_batch=3), rank, 2) for rank in range(2)]
    assert [flat(parts) for parts in zip(*ranks, strict=True)] == steps


def test_batches_continue_in_a_new_process_and_another_world() -> None:
    one = bucketed(global_batch=3)
    one.begin_epoch(2)
    reference = read(one)
    one.advance()
    again = [bucketed(global_batch=3) for _ in range(2)]
    for this in again:
        this.load_state_dict(json.loads(json.dumps(one.state_dict())))
    ranks = [read(this, rank, 2) for rank, this in enumerate(again)]
    assert [flat(parts) for parts in zip(*ranks, strict=True)] == reference[1:]


def test_each_epoch_has_other_batches() -> None:
    one = bucketed()
    assert epoch(one) != epoch(one, 1)
    assert epoch(one) == epoch(bucketed())


@pytest.mark.parametrize(
    "options", [{"batch_sampler": Slow()}, {"batch_size": None, "sampler": Slow()}]
)
def test_a_subclass_of_torchs_batch_sampler_keeps_its_order(options: dict[str, Any]) -> None:
    by_list = "sampler" in options
    given: DataLoader[Any] = DataLoader(ReadByList() if by_list else numbers(), **options)
    one = ElasticLoader(given, global_batch=2)
    assert len(one) == 7  # of 14 batches
    samples = flat(
        batch.tolist() if by_list else batch[0].tolist() for _, batch in one.batches(0, 1)
    )
    assert sorted(samples) == [index * (1 + by_list) for index in range(N)]


def test_a_list_of_batches_is_read_in_its_order() -> None:
    given = DataLoader(numbers(), batch_sampler=[[4, 5, 6], [1], [2, 3]])
    assert read(ElasticLoader(given)) == [[4, 5, 6], [1], [2, 3]]


def test_augmentations_of_batches_do_not_depend_on_the_world() -> None:
    def noise(size: int) -> dict[int, float]:
        one = ElasticLoader(DataLoader(Noise(), batch_sampler=Buckets()), global_batch=3)
        return {
            index: draw
            for rank in range(size)
            for info, (indices, draws) in one.batches(rank, size)
            if info.samples
            for index, draw in zip(indices.tolist(), draws.tolist(), strict=True)
        }

    assert noise(2) == noise(1)
    assert len(set(noise(1).values())) == N


def test_evaluation_distributes_complete_batches() -> None:
    given = DataLoader(numbers(), batch_sampler=Buckets())
    parts = [batch.tolist() for rank in range(3) for (batch,) in shard(given, rank, 3)]
    assert len(parts) == COUNT
    assert sorted(flat(parts)) == list(range(N))
    assert all(len({LENGTHS[index] for index in part}) == 1 for part in parts)
    assert sum(len(shard(given, rank, 3)) for rank in range(3)) == COUNT


def test_two_loaders_fit_if_ranks_have_the_same_share_of_both() -> None:
    """Shares of batches differ in each step; of plain samples, they do not."""
    one, other = bucketed(global_batch=3), bucketed(global_batch=3)
    plain = ElasticLoader(DataLoader(numbers(), batch_size=4), global_batch=9)
    shares = [rank_samples(this.sampler, Position(), 2) for this in (one, other, plain)]
    read_samples = tuple(len(read(one, rank, 2)[0]) for rank in range(2))
    assert shares[0] == read_samples
    assert same_shares(shares[0], shares[1])
    assert shares[2] == (5, 4) and not same_shares(shares[2], (4, 5))


def test_a_batch_sampler_must_yield_lists() -> None:
    given = DataLoader(numbers(), batch_sampler=Yields(lambda: range(5)))
    with pytest.raises(ConfigError, match="yields single indices") as refused:
        ElasticLoader(given)
    assert "sampler=…" in refused.value.hint


# -- evaluation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_evaluation_reads_each_sample_of_the_sampler_once(sampler: str) -> None:
    data = numbers()
    given = DataLoader(data, batch_size=4, sampler=SAMPLERS[sampler](data))
    parts = [[batch.tolist() for (batch,) in shard(given, rank, 3)] for rank in range(3)]
    expected = {"part": PART, "list": PART, "first": list(range(20))}.get(sampler, list(range(N)))
    if sampler.startswith("own"):  # the samples of its first epoch, in that order
        expected = list(dict.fromkeys(epoch(loader(sampler))))
    assert flat(flat(parts)) == expected
    assert [len(shard(given, rank, 3)) for rank in range(3)] == [len(part) for part in parts]


def test_evaluation_distributes_prebatched_items() -> None:
    def sizes(rank: int) -> Iterator[int]:
        return (len(batch) for batch in shard(DataLoader(Batches(), batch_size=None), rank, 2))

    assert [*sizes(0), *sizes(1)] == list(range(1, 10))
