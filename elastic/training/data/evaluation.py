"""Evaluation over all ranks: each sample on exactly one rank, without padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, Sampler

from elastic.errors import ConfigError
from elastic.training.data.plan import check_world, split
from elastic.training.data.source import Collation, describe, over_batches


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


def shard_by(
    loader: DataLoader[Any],
    world: Callable[[], tuple[int, int]],
    *,
    is_even: Callable[[], bool] = lambda: False,
    begins: Callable[[], object] = lambda: None,
) -> DataLoader[Any]:
    """:func:`shard` for a world that changes: ``world() -> (rank, size)``, called per iteration.
    ``begins``: called at the beginning of each iteration.

    ``is_even``: whether all ranks need the same number of batches, because the forward pass of a
    sharded model is one of all its ranks. Then batches are as even as possible, and iterating
    raises ConfigError if there are fewer samples than ranks, or items in batches of their own.
    """
    source = describe(loader)
    part = _Part(source.draw.each_once(), world, begins)
    batches = _Batches(
        part, source.batch_size, is_even, has_items=source.collation is Collation.ITEM
    )
    return over_batches(loader, batches, part, source.collation)


class _Part(Sampler[int]):
    """One rank's range of the samples."""

    def __init__(
        self,
        samples: Sequence[int],
        world: Callable[[], tuple[int, int]],
        begins: Callable[[], object],
    ) -> None:
        self.samples, self.world, self.begins = samples, world, begins

    def __iter__(self) -> Iterator[int]:
        self.begins()
        return iter(self.indices())

    def __len__(self) -> int:
        return len(self.indices())

    def indices(self) -> Sequence[int]:
        """The indices of this rank's samples in the dataset."""
        return self.samples[slice(*split(0, len(self.samples), *self.world()))]


class _Batches(BatchSampler):
    """The batches of a part."""

    def __init__(
        self, part: _Part, batch_size: int, is_even: Callable[[], bool], *, has_items: bool
    ) -> None:
        super().__init__(part, batch_size, drop_last=False)
        self._part, self._is_even, self._has_items = part, is_even, has_items

    def __iter__(self) -> Iterator[list[int]]:
        count = self._even_count()
        if count is None:
            yield from super().__iter__()
            return
        indices = list(self._part)
        for number in range(count):
            yield indices[slice(*split(0, len(indices), number, count))]

    def __len__(self) -> int:
        count = self._even_count()
        return super().__len__() if count is None else count

    def _even_count(self) -> int | None:
        """The same number of batches for each rank; None if it need not be the same."""
        samples, (_, size) = len(self._part.samples), self._part.world()
        if not samples or not self._is_even():
            return None
        fewest, more = divmod(samples, size)
        count = -(-(fewest + bool(more)) // self.batch_size)
        if fewest == 0 or (self._has_items and count > fewest):
            kind = "batches of the dataset" if self._has_items else "samples"
            raise ConfigError(
                f"run.shard: {samples} {kind} for {size} ranks. The forward pass of a sharded "
                "model is one of all its ranks, so each needs the same number of batches",
                hint="evaluate on a multiple of the number of ranks"
                if self._has_items
                else "evaluate on at least as many samples as ranks",
            )
        return min(count, fewest)  # with batches of one sample, the last ranks would lack one
