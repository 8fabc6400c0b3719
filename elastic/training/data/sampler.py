"""A ``DistributedSampler`` whose world may change between any two steps.

torch's sampler distributes samples round-robin over a fixed number of ranks and pads; a resume at
another world size then repeats some samples and never reads others. Here the order depends on the
epoch, and only the division depends on the world (``plan.py``), so neither can happen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import numpy as np
import torch.distributed as dist
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

from elastic.errors import ConfigError
from elastic.training.data.draws import Draw, Order, WholeDataset
from elastic.training.data.permutation import ORDER_VERSION, Int64s
from elastic.training.data.plan import EpochPlan, Position, Span, check_world

# Positions are mapped to samples in blocks: numpy's cost per call (0.2 ms for one small step
# [measured]) is spread over many steps, and the first batch still arrives within milliseconds.
_READ_AHEAD = 32768

# Default values of fields that states of older releases lack.
_UNNAMED = {"sampler": None, "max_steps": None}
_SINCE_LATER = ("subset",)  # not compared with states that lack them


_SAME_DRAW = (
    "every rank and every start of a job needs the same samples: draw splits and weights with a "
    "seeded generator, torch.randperm(n, generator=torch.Generator().manual_seed(0)), "
    "random_split(dataset, lengths, generator=torch.Generator().manual_seed(0))"
)


@dataclass(frozen=True, slots=True)
class MicroShare:
    """The dataset indices of one micro-batch of one rank.

    ``indices`` may be empty: then ``filler``, a sample of the same step, runs with its loss
    masked, because every rank must run the same number of micro-batches. ``first`` is the global
    position of the first index in the epoch; the others follow.
    """

    indices: tuple[int, ...]
    filler: int
    first: int


@dataclass(frozen=True, slots=True)
class RankStep:
    """One rank's part of one step: the dataset indices, in micro-batches."""

    epoch: int
    step: int
    global_samples: int
    micro_batches: tuple[MicroShare, ...]

    @property
    def samples(self) -> int:
        """This rank's samples in the step; 0 is possible in the last step of an epoch."""
        return sum(len(micro.indices) for micro in self.micro_batches)

    @property
    def indices(self) -> tuple[int, ...]:
        """The dataset indices of those samples, in the order of the epoch."""
        return tuple(index for micro in self.micro_batches for index in micro.indices)


class ElasticSampler(DistributedSampler[int]):
    """This rank's indices of an epoch, at any world size, each sample once per epoch.

    Takes the arguments of ``DistributedSampler``, and ``global_batch``: the samples per step of the
    whole job. Nothing is padded. Samples are dropped only by ``drop_last``, which drops the last
    step if it is not full, and by ``max_steps``, after which an epoch ends. ``draw`` is what an
    epoch reads, if not every sample once, and ``subset`` names the samples of a ``Subset``.
    ``num_replicas`` and ``rank`` default to those of the process group, or without one to a world
    of this process only.

    With ``DataLoader(dataset, sampler=sampler, batch_size=sampler.rank_batch)``, each batch
    is this rank's part of one step. The last step of an epoch may be smaller; if it has fewer
    samples than ranks, some ranks get no batch: ``drop_last`` avoids both.

    To resume, save :meth:`state_dict` after :meth:`advance` at the end of each step, and load it
    before iterating. ``len()`` is this rank's samples in a complete epoch, at any position, so
    that schedules computed from it do not depend on a resume.

    Raises ConfigError for an empty dataset, and for a global batch smaller than the world.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        global_batch: int,
        shards: int | None = None,
        max_steps: int | None = None,
        draw: Draw | None = None,
        subset: str | None = None,
    ) -> None:
        world = _from_group(dist.get_world_size, 1) if num_replicas is None else num_replicas
        rank = _from_group(dist.get_rank, 0) if rank is None else rank
        check_world(rank, world)
        self._subset = subset
        self.draw = draw or WholeDataset(size_of(dataset), shuffle=shuffle)
        self.plan = EpochPlan(self.draw.n, global_batch, drop_last, shards, max_steps)
        super().__init__(dataset, world, rank, shuffle, seed, drop_last)
        self.step = 0
        self._order: tuple[int, Order] | None = None
        self.set_world(rank, world)

    @property
    def position(self) -> Position:
        """The epoch, and the number of its steps that are done."""
        return Position(self.epoch, self.step)

    @property
    def rank_batch(self) -> int:
        """This rank's samples in a full step: the ``batch_size`` for one batch per step."""
        start, stop = self.plan.share(0, self.plan.global_batch, self.rank, self.num_replicas)
        return stop - start

    def seek(self, position: Position) -> None:
        """Continue at ``position``. ``step`` may equal the number of steps: the epoch is complete.

        Raises :class:`~elastic.ConfigError` if the epoch has no such step.
        """
        if position.epoch < 0 or not 0 <= position.step <= self.plan.steps:
            raise ConfigError(
                f"no such position in the data: epoch {position.epoch}, step {position.step}",
                hint=f"an epoch has {self.plan.steps} steps of {self.plan.global_batch} samples",
            )
        self.epoch, self.step = position.epoch, position.step

    def advance(self) -> None:
        """Advance the position: the step is done.

        Raises :class:`~elastic.ConfigError` at the end of the epoch, which has no further step.
        """
        self.seek(Position(self.epoch, self.step + 1))

    def set_epoch(self, epoch: int) -> None:
        """Start ``epoch``, or stay in the middle of it if it is the resumed one.

        Raises :class:`~elastic.ConfigError` if it is negative.
        """
        if epoch != self.epoch:
            self.seek(Position(epoch, 0))

    def set_world(self, rank: int, size: int) -> None:
        """Use ``rank`` and ``size`` from the next iteration on: same global batches, same order.

        Raises :class:`~elastic.ConfigError` for a rank outside the world, and for a world with more
        ranks than a global batch has samples or shards.
        """
        self.plan.check_world(rank, size)
        self.rank, self.num_replicas = rank, size
        self.num_samples = sum(stop - start for start, stop in self._kinds_of_share())
        self.total_size = self.plan.samples

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        return (index for step in self.steps() for index in step.indices)

    def steps(self, micro_batch: int | None = None) -> Iterator[RankStep]:
        """This rank's part of each step from the position to the end of the epoch.

        Position and world are read now, not at the first step: data workers
        read ahead, and must not see a changing position.
        """
        return self._steps(self.position, self.rank, self.num_replicas, micro_batch)

    def samples_at(self, epoch: int, positions: Int64s) -> Int64s:
        """The dataset indices at global ``positions`` of ``epoch``."""
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self.draw.order(self.seed, epoch))
        return self._order[1](positions)

    def state_dict(self) -> dict[str, Any]:
        """The position, and everything that it depends on, as JSON values."""
        position = {"epoch": self.epoch, "step": self.step}
        return {**self._identity(), "max_steps": self.plan.max_steps, **position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where :meth:`state_dict` was taken, at any world size.

        Raises ConfigError if the state belongs to another order, dataset or global batch: the
        position would denote other samples. ``max_steps`` may differ: it determines where epochs
        end from now on, and a complete epoch stays complete.
        """
        here = self._identity()
        later = {name: here[name] for name in _SINCE_LATER}
        state = {**_UNNAMED, **later, **state}
        for name in self.state_dict().keys() - state.keys():
            raise ConfigError(f"the saved data position lacks {name!r}: {dict(state)}")
        for name, value in here.items():
            if state[name] != value:
                raise ConfigError(
                    f"the data position was saved with {name}={state[name]!r}, "
                    f"but this run has {name}={value!r}",
                    hint=_SAME_DRAW
                    if name in ("sampler", "subset")
                    else f"resume with {name}={state[name]!r}; only the world and max_steps may "
                    "change",
                )
        step, steps = int(state["step"]), self.plan.steps
        before = dataclasses.replace(self.plan, max_steps=state["max_steps"]).steps
        is_complete = step == before or steps < step < before
        self.seek(Position(int(state["epoch"]), steps if is_complete else step))

    def _identity(self) -> dict[str, Any]:
        return {
            "order_version": ORDER_VERSION,
            "n": self.plan.n,
            "global_batch": self.plan.global_batch,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "shards": self.plan.shards,
            "sampler": self.draw.name,
            "subset": self._subset,
        }

    def _kinds_of_share(self) -> Iterator[Span]:
        """Spans whose total length is this rank's part of an epoch; not one per step."""
        full, tail = divmod(self.plan.samples, self.plan.global_batch)
        yield 0, full * self.rank_batch
        yield self.plan.share(0, tail, self.rank, self.num_replicas)

    def _steps(
        self, position: Position, rank: int, world: int, micro_batch: int | None
    ) -> Iterator[RankStep]:
        step, last = position.step, self.plan.steps - 1
        full, tail = (self._sizes(number, rank, world, micro_batch) for number in (0, last))
        while step <= last:
            chunk = self._chunk(step, rank, world)
            ranges = [self._read_positions(number, rank, world) for number in chunk]
            samples = iter(self.samples_at(position.epoch, np.concatenate(ranges)).tolist())
            for number in chunk:
                total, sizes = full if number < last else tail
                filler = next(samples)
                first = self.plan.share(*self.plan.span(number), rank, world)[0]
                micros = []
                for size in sizes:
                    micros.append(MicroShare(tuple(islice(samples, size)), filler, first))
                    first += size
                yield RankStep(position.epoch, number, total, tuple(micros))
            step = chunk.stop

    def _chunk(self, step: int, rank: int, world: int) -> range:
        steps = max(1, _READ_AHEAD * world // self.plan.global_batch)
        return range(step, min(step + steps, self.plan.steps))

    def _read_positions(self, step: int, rank: int, world: int) -> Int64s:
        """The positions of the rank's share, preceded by the step's first position: the filler."""
        start, stop = self.plan.span(step)
        first, last = self.plan.share(start, stop, rank, world)
        return np.concatenate(([start], np.arange(first, last, dtype=np.int64)))

    def _sizes(
        self, step: int, rank: int, world: int, micro_batch: int | None
    ) -> tuple[int, list[int]]:
        """The number of samples of ``step`` on all ranks, and of each of this rank's
        micro-batches."""
        start, stop = self.plan.span(step)
        spans = self.plan.micro_batches(start, stop, rank, world, micro_batch)
        return stop - start, [last - first for first, last in spans]


def _from_group(read: Callable[[], int], default: int) -> int:
    return read() if dist.is_available() and dist.is_initialized() else default


def size_of(dataset: Dataset[Any]) -> int:
    if not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"{type(dataset).__name__} has no len(): its samples cannot be distributed",
            hint="define __len__ and __getitem__ by index in the dataset",
        )
    return len(cast(Sized, dataset))
