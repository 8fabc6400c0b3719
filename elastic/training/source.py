"""What a user's ``DataLoader`` says about its data, and the same loader over other batches."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)
from torch.utils.data.distributed import DistributedSampler

from elastic.errors import ConfigError
from elastic.training.data_workers import make_ready_to_fork
from elastic.training.sampler import ElasticSampler

_GENERATE = "or make the data from (seed, step, shard) with run.generate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The data of a ``DataLoader``, as far as its order and batches go."""

    dataset: Dataset[Any]
    batch_size: int
    drop_last: bool
    shuffle: bool
    seed: int | None = None  # None: the loader names none, the job's holds
    global_batch: int | None = None  # None: the loader names none


class ReplacedBatches(Sampler[list[int]]):
    """Batches of ours in a user's loader, which remember what it said before."""

    def __init__(self, source: Source) -> None:
        self.source = source


def describe(loader: object) -> Source:
    """Read a loader's order and batch size.

    Raises ConfigError, saying what to use instead, for a loader whose order is not "all samples
    once, in order or shuffled": iterable datasets, other samplers, other batch samplers.
    """
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"not a DataLoader: {type(loader).__name__}",
            hint="pass the DataLoader; one that is wrapped is named beside its wrapper: "
            "run.loader(wrapper, dataloader=inner)",
        )
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            f"{type(loader.dataset).__name__} is an IterableDataset: it has no samples to deal out",
            hint=f"give the dataset __len__ and __getitem__, {_GENERATE}",
        )
    batches = loader.batch_sampler
    if isinstance(batches, ReplacedBatches):
        return batches.source  # changed in place before, and given to us again
    if type(batches) is not BatchSampler:
        raise ConfigError(
            f"the loader's batches come from {type(batches).__name__}, which cannot be dealt out",
            hint=f"use DataLoader(dataset, batch_size=…, shuffle=…), {_GENERATE}",
        )
    return _with_sampler(loader.dataset, batches)


def _with_sampler(dataset: Dataset[Any], batches: BatchSampler) -> Source:
    sampler: object = batches.sampler
    seed = global_batch = None
    if isinstance(sampler, ElasticSampler):
        shuffle, seed, global_batch = sampler.shuffle, sampler.seed, sampler.plan.global_batch
    elif type(sampler) is DistributedSampler:
        shuffle, seed = sampler.shuffle, sampler.seed
    elif type(sampler) in (RandomSampler, SequentialSampler):
        shuffle = type(sampler) is RandomSampler
        _check_reads_all(sampler, dataset)
    else:
        raise ConfigError(
            f"the order of {type(sampler).__name__} cannot be kept over changes of the world",
            hint="use shuffle=True or False (a part of a dataset: torch.utils.data.Subset), "
            + _GENERATE,
        )
    return Source(
        dataset=dataset,
        batch_size=batches.batch_size,
        drop_last=batches.drop_last,
        shuffle=shuffle,
        seed=seed,
        global_batch=global_batch,
    )


def _check_reads_all(sampler: Any, dataset: Any) -> None:
    again = isinstance(sampler, RandomSampler) and sampler.replacement
    samples = len(sampler)
    if again or samples != len(dataset):
        raise ConfigError(
            f"{type(sampler).__name__} draws {samples} samples of {len(dataset)}"
            + (" with replacement" if again else ""),
            hint="an epoch reads each sample once: use DataLoader(dataset, shuffle=True) "
            "and other numbers of epochs",
        )


def over_batches(
    loader: DataLoader[Any],
    batches: Sampler[list[int]],
    sampler: Sampler[int],
    *,
    in_place: bool = False,
) -> DataLoader[Any]:
    """The same loader (workers, collate_fn, pinning, subclass, …) reading ``batches`` instead.

    A shallow copy, so that a subclass and whatever torch adds to ``DataLoader`` come along;
    ``in_place`` changes the loader itself, for wrappers that hold it. Its iterators read
    ``batch_sampler`` when they are made and not before (``_BaseDataLoaderIter.__init__``); the
    guard in ``DataLoader.__setattr__`` keeps users from changing ``batch_size`` without effect.
    """
    if loader.num_workers:
        make_ready_to_fork()
    ours = loader if in_place else copy.copy(loader)
    object.__setattr__(ours, "batch_sampler", batches)
    object.__setattr__(ours, "sampler", sampler)
    # Persistent workers' iterator holds the old batches, and a copy must not share it.
    ours._iterator = None
    # Batches are matched with the plan by their order.
    ours.in_order = True
    # Torch draws the workers' base seed from this one: from its own, not the training's.
    ours.generator = torch.Generator()
    return ours
