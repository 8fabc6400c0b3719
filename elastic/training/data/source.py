"""Describes the data of a user's ``DataLoader``, and replaces the loader's batches."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
)
from torch.utils.data.distributed import DistributedSampler

from elastic.errors import ConfigError
from elastic.torch_private import forget_iterator
from elastic.training.data.data_workers import make_ready_to_fork
from elastic.training.data.draws import Draw, WholeDataset, draw_of, subset_of
from elastic.training.data.sampler import ElasticSampler, size_of

# The alternative for data that cannot be distributed here: the script distributes it.
_OWN_LOOP = (
    "or distribute it yourself, the same amount to every rank, in your own loop: "
    "`run.begin()` before each step and `run.commit()` after it"
)


class Collation(Enum):
    """How the samples of one batch are read."""

    SAMPLES = "samples"  # each is read, and collate_fn combines them into a batch: torch's default
    ITEM = "item"  # batch_size=None: each item of the dataset is already a batch
    LIST = "list"  # batch_size=None with a BatchSampler: the dataset gets the list of indices


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """The order and the batches of a ``DataLoader``'s data."""

    dataset: Dataset[Any]
    batch_size: int
    drop_last: bool
    shuffle: bool
    draw: Draw
    samples: int  # of the dataset
    subset: str | None = None  # the samples of a Subset
    collation: Collation = Collation.SAMPLES
    seed: int | None = None  # None: the job's seed applies
    global_batch: int | None = None  # None: the loader does not specify one

    def check_size(self) -> None:
        """Raise ConfigError if the dataset has grown or shrunk: the order covers its first size."""
        if (now := size_of(self.dataset)) != self.samples:
            raise ConfigError(
                f"the dataset had {self.samples} samples when run.loader was called, and now has "
                f"{now}: a resumed job could not reproduce the order",
                hint="for samples that are added in rounds (active learning), register a loader "
                "for the size of each round before training, over a dataset that looks up its "
                "samples in a tracked object",
            )


class ReplacedBatches(Sampler[list[int]]):
    """Replaces the batches of a user's loader, and describes the original ones."""

    def __init__(self, source: DataSource) -> None:
        self.source = source


def describe(loader: object) -> DataSource:
    """Read a loader's order and batch size.

    Raises ConfigError, with an alternative, for a loader whose order is not a function of a
    position: iterable datasets, and samplers and batch samplers that are not torch's own.
    """
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"not a DataLoader: {type(loader).__name__}",
            hint="pass the DataLoader; pass a wrapped one together with its wrapper: "
            "run.loader(wrapper, dataloader=inner)",
        )
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            f"{type(loader.dataset).__name__} is an IterableDataset: samples cannot be distributed",
            hint="define `__len__` and `__getitem__(index)` in the dataset "
            f"(torch.utils.data.Dataset), {_OWN_LOOP}",
        )
    if type(loader).__module__.partition(".")[0] == "torchdata":
        raise ConfigError(
            f"a {type(loader).__name__} keeps its own position, which does not follow a change of "
            "the world",
            hint="pass torch.utils.data.DataLoader with the same arguments: run.loader saves and "
            "restores the position",
        )
    for replaced in (loader.batch_sampler, loader.sampler):
        if isinstance(replaced, ReplacedBatches):
            return replaced.source  # the loader was changed in place before, and is passed again
    batches = loader.batch_sampler
    if batches is None:
        return _without_collation(loader)
    if type(batches) is not BatchSampler:
        raise _unknown_batches(batches)
    return _with_sampler(loader.dataset, batches)


def _unknown_batches(batches: object) -> ConfigError:
    return ConfigError(
        f"the loader's batches come from {type(batches).__name__}, which cannot be distributed",
        hint="use DataLoader(dataset, batch_size=…, sampler=…); for fixed batches, use "
        "DataLoader(…, batch_size=None) and a dataset whose `__getitem__(i)` returns "
        "`collate_fn([dataset[j] for j in batches[i]])`, " + _OWN_LOOP,
    )


def _without_collation(loader: DataLoader[Any]) -> DataSource:
    """``batch_size=None``: torch passes the sampler's values to the dataset one at a time."""
    sampler: object = loader.sampler
    if type(sampler) is BatchSampler:
        source = _with_sampler(loader.dataset, sampler)
        return dataclasses.replace(source, collation=Collation.LIST)
    if isinstance(sampler, BatchSampler):
        raise _unknown_batches(sampler)
    source = _with_sampler(loader.dataset, BatchSampler(loader.sampler, 1, drop_last=False))
    return dataclasses.replace(source, collation=Collation.ITEM)


def _with_sampler(dataset: Dataset[Any], batches: BatchSampler) -> DataSource:
    sampler: object = batches.sampler
    samples = size_of(dataset)
    seed = global_batch = None
    draw: Draw | None
    if isinstance(sampler, ElasticSampler):
        shuffle, seed, global_batch = sampler.shuffle, sampler.seed, sampler.plan.global_batch
        draw = sampler.draw
    elif type(sampler) is DistributedSampler:
        shuffle, seed = sampler.shuffle, sampler.seed
        draw = WholeDataset(samples, shuffle=shuffle)
    else:
        shuffle = isinstance(sampler, RandomSampler)
        draw = draw_of(sampler, samples)
    if draw is None:
        raise ConfigError(
            f"the order of {type(sampler).__name__} cannot be reproduced in another world: "
            "only the process that draws it can repeat it",
            hint="if it is the same in each epoch and on each rank, pass it as a list: "
            "DataLoader(dataset, sampler=list(sampler), …); for an order drawn in each epoch, use "
            "shuffle=True, SubsetRandomSampler(indices) or "
            "WeightedRandomSampler(weights, num_samples)",
        )
    return DataSource(
        dataset=dataset,
        batch_size=batches.batch_size,
        drop_last=batches.drop_last,
        shuffle=shuffle,
        draw=draw,
        samples=samples,
        subset=subset_of(dataset),
        seed=seed,
        global_batch=global_batch,
    )


class OnlyItem:
    """Adapts the user's ``collate_fn`` to the copied loader, which reads one item as a list of
    one."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, items: list[Any]) -> Any:
        (item,) = items
        return self.collate(item)


def over_batches(
    loader: DataLoader[Any],
    batches: Sampler[list[int]],
    sampler: Sampler[int],
    collation: Collation,
    *,
    in_place: bool = False,
) -> DataLoader[Any]:
    """The same loader (workers, collate_fn, pinning, subclass, …), but reading ``batches``.

    It is a shallow copy, which keeps subclasses and attributes that torch may add to
    ``DataLoader``; ``in_place`` changes the loader itself, for wrappers that refer to it. Iterators
    read ``batch_sampler`` only when they are created (``_BaseDataLoaderIter.__init__``). The guard
    in ``DataLoader.__setattr__`` only keeps users from changing ``batch_size`` without effect.
    """
    if loader.num_workers:
        make_ready_to_fork()
    ours = loader if in_place else copy.copy(loader)
    by_list = collation is Collation.LIST
    object.__setattr__(ours, "batch_sampler", None if by_list else batches)
    object.__setattr__(ours, "sampler", batches if by_list else sampler)
    if collation is Collation.ITEM and not isinstance(ours.collate_fn, OnlyItem):
        ours.collate_fn = OnlyItem(ours.collate_fn)
    # The iterator of persistent workers holds the old batches: a copy must not share it.
    forget_iterator(ours)
    # Batches are matched with the plan by their order.
    ours.in_order = True
    # torch draws the workers' base seed from this generator instead of the script's, into a tensor
    # on the default device.
    ours.generator = torch.Generator(torch.get_default_device())
    return ours
