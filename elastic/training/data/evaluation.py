"""Evaluation over all ranks: each sample on exactly one rank, without padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Sampler

from elastic.training.data.plan import check_world, split
from elastic.training.data.source import describe, over_batches


def shard(loader: DataLoader[Any], rank: int, size: int) -> DataLoader[Any]:
    """The part of rank ``rank`` of ``size``: a contiguous range of the dataset, in its order.

    If the loader reads only a part of its dataset (``SubsetRandomSampler``, a list of indices, a
    shorter ``SequentialSampler``), it is a range of that part. How often and in which order other
    samplers draw has no effect: each sample comes once. Dataset, workers, collate_fn and batch size
    are kept. Parts differ by at most one sample. With fewer samples than ranks, some ranks get no
    batch, so a loop over it must not contain collectives. The last batch is never dropped.
    Raises ConfigError for a loader that cannot be distributed.
    """
    check_world(rank, size)
    return shard_by(loader, lambda: (rank, size))


def shard_by(loader: DataLoader[Any], world: Callable[[], tuple[int, int]]) -> DataLoader[Any]:
    """:func:`shard` for a world that changes: ``world() -> (rank, size)``, called per iteration."""
    source = describe(loader)
    part = _Part(source.draw.each_once(), world)
    batches = BatchSampler(part, source.batch_size, drop_last=False)
    return over_batches(loader, batches, part, source.collation)


class _Part(Sampler[int]):
    """One rank's range of the samples."""

    def __init__(self, samples: Sequence[int], world: Callable[[], tuple[int, int]]) -> None:
        self._samples, self._world = samples, world

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices())

    def __len__(self) -> int:
        return len(self._indices())

    def _indices(self) -> Sequence[int]:
        return self._samples[slice(*split(0, len(self._samples), *self._world()))]
