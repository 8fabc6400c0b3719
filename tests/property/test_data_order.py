"""Over any history of worlds, stops and resumes: each sample once per epoch, in the same steps."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from elastic.train.loader import ElasticLoader
from elastic.train.sampler import MAX_N, ElasticSampler, EpochPlan, Permutation, RankStep

EPOCHS = 2


@dataclass(frozen=True)
class Era:
    """A world: the number of its steps, how it ended, and whether its processes were new."""

    size: int
    steps: int
    resumes: bool
    """From a saved state, in new processes; else the samplers live on and are told the world."""
    loses: int
    """Steps done since the state that the next era starts from: they are done again."""


@dataclass(frozen=True)
class History:
    n: int
    global_batch: int
    shards: int | None
    micro_batch: int | None
    seed: int
    eras: tuple[Era, ...]


@st.composite
def histories(draw: st.DrawFn) -> History:
    n = draw(st.integers(1, 80))
    global_batch = draw(st.integers(1, 24))
    shards = draw(st.none() | st.integers(1, global_batch))
    era = st.builds(
        Era,
        size=st.integers(1, min(shards or global_batch, 8)),
        steps=st.integers(0, 5),
        resumes=st.booleans(),
        loses=st.integers(0, 2),
    )
    return History(
        n=n,
        global_batch=global_batch,
        shards=shards,
        micro_batch=draw(st.none() | st.integers(1, 8)),
        seed=draw(st.integers(-(2**31), 2**31)),
        eras=tuple(draw(st.lists(era, min_size=1, max_size=6))),
    )


@dataclass
class Ledger:
    """The samples of each rank by (epoch, step). A repeated step replaces the earlier one."""

    steps: dict[tuple[int, int], list[tuple[int, ...]]] = field(default_factory=dict)

    def samples(self, epoch: int) -> list[int]:
        parts = [parts for (of, _), parts in self.steps.items() if of == epoch]
        return [index for ranks in parts for rank in ranks for index in rank]


class Job:
    """Ranks that train for some steps, lose some of them, and continue as another world."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.ledger = Ledger()
        self.state: dict[str, Any] = self._sampler(0, 1).state_dict()
        self.ranks: list[ElasticSampler] = []
        self.parts: list[Iterator[RankStep]] = []

    def run(self) -> Ledger:
        # The history is repeated until the epochs are complete; the last era loses no steps.
        eras = itertools.cycle(self.history.eras)
        while self.state["epoch"] < EPOCHS:
            self._era(next(eras))
        return self.ledger

    def _era(self, era: Era) -> None:
        self._begin(era)
        states = [self.state]
        for _ in range(era.steps + 1):
            if self.ranks[0].epoch == EPOCHS:
                break
            self._step()
            states.append(json.loads(json.dumps(self.ranks[0].state_dict())))
        # At least one step of each era is kept, since a job without progress never ends.
        self.state = states[max(1, len(states) - 1 - era.loses)]

    def _begin(self, era: Era) -> None:
        live = [] if era.resumes else self.ranks[: era.size]
        for rank, sampler in enumerate(live):
            sampler.set_world(rank, era.size)
        self.ranks = live + [self._sampler(rank, era.size) for rank in range(len(live), era.size)]
        for sampler in self.ranks:
            sampler.load_state_dict(self.state)
        self._iterate()

    def _iterate(self) -> None:
        self.parts = [sampler.steps(self.history.micro_batch) for sampler in self.ranks]

    def _step(self) -> None:
        parts = [next(own) for own in self.parts]
        assert len({(part.epoch, part.step) for part in parts}) == 1
        assert len({len(part.micro_batches) for part in parts}) == 1
        assert sum(part.samples for part in parts) == parts[0].global_samples
        self.ledger.steps[parts[0].epoch, parts[0].step] = [part.indices for part in parts]
        for sampler in self.ranks:
            sampler.advance()
        if self.ranks[0].step == self.ranks[0].plan.steps:
            for sampler in self.ranks:
                sampler.set_epoch(sampler.epoch + 1)
            self._iterate()

    def _sampler(self, rank: int, size: int) -> ElasticSampler:
        data = TensorDataset(torch.arange(self.history.n))
        return ElasticSampler(
            data,
            size,
            rank,
            seed=self.history.seed,
            global_batch=self.history.global_batch,
            shards=self.history.shards,
        )


@given(histories())
def test_every_history_reads_each_sample_once_per_epoch(history: History) -> None:
    ledger = Job(history).run()
    for epoch in range(EPOCHS):
        assert sorted(ledger.samples(epoch)) == list(range(history.n))


@given(histories())
def test_the_global_batches_do_not_depend_on_the_history(history: History) -> None:
    ledger = Job(history).run()
    one_era = Era(size=1, steps=10**6, resumes=True, loses=0)
    undisturbed = Job(History(**{**vars(history), "eras": (one_era,)})).run()
    assert ledger.steps.keys() == undisturbed.steps.keys()
    for at, parts in ledger.steps.items():
        assert [index for part in parts for index in part] == list(undisturbed.steps[at][0])


@given(
    n=st.integers(1, 10**12),
    global_batch=st.integers(1, 10**6),
    world=st.integers(1, 5000),
    micro_batch=st.none() | st.integers(1, 10**4),
    data=st.data(),
)
def test_shares_differ_by_one_and_micro_batches_fit(
    n: int, global_batch: int, world: int, micro_batch: int | None, data: st.DataObject
) -> None:
    plan = EpochPlan(n, global_batch)
    start, stop = plan.span(data.draw(st.integers(0, plan.steps - 1)))
    rank = data.draw(st.integers(0, world - 1))
    first, last = plan.share(start, stop, rank, world)
    assert (stop - start) // world <= last - first <= -(-(stop - start) // world)
    assert plan.share(start, stop, 0, world)[0] == start
    assert plan.share(start, stop, world - 1, world)[1] == stop
    if rank + 1 < world:
        assert plan.share(start, stop, rank + 1, world)[0] == last
    micro_batch = micro_batch and max(micro_batch, (last - first) // 100)
    spans = plan.micro_batches(start, stop, rank, world, micro_batch)
    assert len(spans) == plan.micro_batch_count(start, stop, world, micro_batch)
    assert [spans[0][0], *(span[1] for span in spans)] == [
        first,
        *(span[0] for span in spans[1:]),
        last,
    ]
    assert all(span[1] - span[0] <= (micro_batch or last - first) for span in spans)


@given(
    n=st.integers(1, 60),
    batch_size=st.integers(1, 9),
    micro_batch=st.none() | st.integers(1, 5),
    worlds=st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
def test_a_loader_yields_the_samples_of_the_committed_steps(
    n: int, batch_size: int, micro_batch: int | None, worlds: list[int]
) -> None:
    loader = ElasticLoader(
        DataLoader(TensorDataset(torch.arange(n)), batch_size, shuffle=True),
        largest_world=5,
        micro_batch=micro_batch,
    )
    read: list[int] = []
    for world in itertools.cycle(worlds):
        step = loader.position.step
        if step == len(loader):
            break
        for rank in range(world):
            batches = loader.batches(rank, world)
            for info, (batch,) in batches:
                if info.step != step:
                    break
                read += batch.tolist() if info.samples else []
        loader.advance()
    assert sorted(read) == list(range(n))


@given(
    n=st.integers(1, 90),
    batch_size=st.integers(1, 5),
    largest=st.integers(1, 6),
    accumulated=st.integers(1, 7),
    drop_last=st.booleans(),
    weights=st.sampled_from(["samples", "equal"]),
    worlds=st.lists(st.integers(1, 6), min_size=1, max_size=4),
)
def test_steps_of_a_framework_are_divided_exactly(
    n: int,
    batch_size: int,
    largest: int,
    accumulated: int,
    drop_last: bool,
    weights: str,
    worlds: list[int],
) -> None:
    """Update u has the samples of ``accumulated`` batches of all ranks of the largest world, in
    any world: each once, contiguous and in order, in equally many micro-batches on each rank."""
    each = batch_size * largest
    complete = n // each * each if drop_last else n
    if not complete:
        return
    shuffled = list(range(n))
    random.Random(n).shuffle(shuffled)
    loader = ElasticLoader(
        DataLoader(TensorDataset(torch.arange(n)), batch_size, drop_last=drop_last),
        largest_world=largest,
        micro_batches=accumulated,
        order=lambda epoch: shuffled,
        weights=weights,
    )
    expected = [
        shuffled[first : min(first + accumulated * each, complete)]
        for first in range(0, complete, accumulated * each)
    ]
    assert len(loader) == len(expected)
    assert loader.micro_batches_per_epoch == math.ceil(complete / each)
    for world, (step, samples) in zip(itertools.cycle(worlds), enumerate(expected)):
        world = min(world, accumulated * each)
        first, total_weight, mean_weight = step * accumulated * each, 0.0, 0.0
        read: list[int] = []
        for rank in range(world):
            batches = loader.batches(rank, world)
            own = 0
            for micro, (info, (batch,)) in enumerate(batches):
                share = loader.share
                assert (share.step, share.micro_batch) == (step, micro)
                assert (share.ranks, share.total) == (world, len(samples))
                assert len(share.micro_batches) == math.ceil(len(samples) / each)
                part = share.micro_batches[micro]
                assert part.start == first + own and part.stop <= share.positions.stop
                assert info.samples == len(part)
                read += batch.tolist() if info.samples else []
                own += len(part)
                mean_weight += info.rank_weight * share.mean_weights[micro]
                if info.is_last_micro_batch:
                    break
            assert share.positions == range(first, first + own)
            total_weight += info.rank_weight
            first += own
        assert read == samples
        assert total_weight == pytest.approx(1) and mean_weight == pytest.approx(1)
        loader.advance()


@st.composite
def samplers(draw: st.DrawFn) -> tuple[int, Any]:
    """The size of a dataset, and one of torch's samplers for it."""
    n = draw(st.integers(2, 40))
    indices = draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=30))
    count = draw(st.integers(1, 60))
    weights = draw(st.lists(st.floats(0, 9), min_size=1, max_size=n).filter(any))
    drawable = sum(weight > 0 for weight in weights)
    return n, draw(
        st.sampled_from(
            [
                SubsetRandomSampler(indices),
                indices,
                RandomSampler(range(n), num_samples=count),
                RandomSampler(range(n), replacement=True, num_samples=count),
                WeightedRandomSampler(weights, count),
                WeightedRandomSampler(weights, min(count, drawable), replacement=False),
            ]
        )
    )


@given(
    given=samplers(),
    batch_size=st.integers(1, 9),
    max_steps=st.none() | st.integers(1, 5),
    seed=st.integers(-(2**63), 2**63),
    epoch=st.integers(0, 1000),
    worlds=st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
def test_the_drawn_order_does_not_depend_on_the_worlds(
    given: tuple[int, Any],
    batch_size: int,
    max_steps: int | None,
    seed: int,
    epoch: int,
    worlds: list[int],
) -> None:
    n, sampler = given

    def process(state: dict[str, Any] | None) -> ElasticLoader:
        loader = ElasticLoader(
            DataLoader(TensorDataset(torch.arange(n)), batch_size, sampler=sampler),
            seed=seed,
            largest_world=5,
            max_steps=max_steps,
        )
        loader.begin_epoch(epoch)
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        return loader

    alone = [index for info, _ in process(None).batches(0, 1) for index in info.indices]
    assert len(alone) == min(len(sampler), (max_steps or n * 60) * 5 * batch_size)
    read: list[int] = []
    state: dict[str, Any] | None = None
    for step, world in zip(range(len(process(None))), itertools.cycle(worlds)):
        loader = process(state)
        for rank in range(world):
            info, (batch,) = next(loader.batches(rank, world))
            assert info.step == step
            read += batch.tolist() if info.samples else []
        loader.advance()
        state = loader.state_dict()
    assert read == alone


# -- the order ------------------------------------------------------------------------------------


@given(
    n=st.integers(1, MAX_N) | st.integers(1, 300),
    seed=st.integers(-(2**64), 2**64),
    epoch=st.integers(0, 10**6),
    data=st.data(),
)
def test_the_order_is_a_permutation_at_any_size(
    n: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    positions = data.draw(st.lists(st.integers(0, n - 1), max_size=50, unique=True))
    order = Permutation(n, seed=seed, epoch=epoch)
    samples = order.at(np.array(positions, dtype=np.int64))
    assert len(set(samples.tolist())) == len(positions)
    assert all(0 <= sample < n for sample in samples.tolist())
    assert order.position_of(samples).tolist() == positions


def order(n: int, *, seed: int, epoch: int) -> list[int]:
    return [int(sample) for sample in Permutation(n, seed=seed, epoch=epoch).at(np.arange(n))]


@pytest.mark.parametrize("n", [3, 4, 5])
def test_all_orders_of_few_samples_are_equally_likely(n: int) -> None:
    """The smallest domains are the hardest for a Feistel network: halves of one bit."""
    expected = 10
    draws = math.factorial(n) * expected
    seen = Counter(tuple(order(n, seed=5, epoch=epoch)) for epoch in range(draws))
    counts = np.array([seen[one] for one in itertools.permutations(range(n))])
    assert deviation(counts, expected, math.factorial(n) - 1) < 4


@pytest.mark.parametrize("n", [10, 50])
def test_every_sample_is_equally_likely_at_every_position(n: int) -> None:
    orders = np.array([order(n, seed=9, epoch=epoch) for epoch in range(500)])
    counts = np.array([np.bincount(orders[:, position], minlength=n) for position in range(n)])
    assert deviation(counts, 500 / n, (n - 1) ** 2) < 4


def deviation(counts: npt.NDArray[np.int64], expected: float, freedom: int) -> float:
    """How many standard deviations chi-squared lies above its mean."""
    chi_squared = float((((counts - expected) ** 2) / expected).sum())
    return (chi_squared - freedom) / math.sqrt(2 * freedom)
