"""Random numbers of data loading as a function of (seed, epoch, sample index), or, if an
epoch may read a sample more than once, of (seed, epoch, position).

A sample's augmentation must not depend on which rank or data worker reads it, nor on what that
process read before: otherwise a step repeated in another world would train on other data. The seed
is sent with the indices, because persistent data workers are not notified of a new epoch; the
user's dataset, collate_fn and worker_init_fn stay unchanged.

``random``, ``numpy.random`` and torch's CPU generator are seeded: 8 µs per sample [measured]. So is
that of this process's GPU, once it is in use: a dataset may draw there, for example after
``torch.set_default_device("cuda")``. Generators owned by a dataset (``np.random.default_rng()``)
are not. Nothing is seeded for datasets that torch's own classes only index: they draw nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from elastic.training.data.randomness import derive_seed

_BY_POSITION = 1  # part of the key


def draws_nothing(loader: DataLoader[Any]) -> bool:
    """Whether it is certain that reading this loader's data uses no random generator.

    Subclasses and user-defined classes count as drawing.
    """
    is_torchs = type(loader) is DataLoader and loader.collate_fn is default_collate
    return is_torchs and _only_indexes(loader.dataset)


def _only_indexes(dataset: Dataset[Any]) -> bool:
    if isinstance(dataset, Subset) and type(dataset) is Subset:
        return _only_indexes(dataset.dataset)
    if isinstance(dataset, ConcatDataset) and type(dataset) is ConcatDataset:
        return all(map(_only_indexes, dataset.datasets))
    if isinstance(dataset, StackDataset) and type(dataset) is StackDataset:
        parts = dataset.datasets
        return all(map(_only_indexes, parts.values() if isinstance(parts, dict) else parts))
    return type(dataset) is TensorDataset


class SeededBatch(list[int]):
    """Dataset indices that seed the generators for their sample while they are iterated.

    ``DataLoader`` reads a batch with ``[dataset[i] for i in batch]``
    (torch/utils/data/_utils/fetch.py), so each sample has its own seed, and collate_fn continues
    with the last sample's. A dataset whose ``__getitems__`` takes the whole batch without
    iterating over it draws unseeded.
    """

    def __init__(
        self, indices: Iterable[int], seed: int, epoch: int, first: int | None = None
    ) -> None:
        super().__init__(indices)
        self._seed, self._epoch, self._first = seed, epoch, first

    def __iter__(self) -> Iterator[int]:
        for number, index in enumerate(super().__iter__()):
            # If a sample may come twice in an epoch, its draws depend on its position.
            of = (index,) if self._first is None else (self._first + number, _BY_POSITION)
            _seed_generators(derive_seed(self._seed, self._epoch, *of))
            yield index

    def __reduce__(self) -> tuple[type[SeededBatch], tuple[list[int], int, int, int | None]]:
        # The inherited method iterates, which would seed the process that sends the batch.
        return SeededBatch, (self[:], self._seed, self._epoch, self._first)


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Restore this process's generators afterwards, for data that is read without workers."""
    python, numpy = random.getstate(), np.random.get_state(legacy=False)
    of_torch = [(generator, generator.get_state()) for generator in _generators_of_torch()]
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        for generator, state in of_torch:
            generator.set_state(state)


def _generators_of_torch() -> list[torch.Generator]:
    """The CPU's, and this process's GPU's if CUDA is initialized here: not in forked workers."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return [torch.default_generator]
    return [torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]]


def _seed_generators(seed: int) -> None:
    # Not torch.manual_seed: it seeds every device, and formats a stack trace for each that is not
    # initialized.
    for generator in _generators_of_torch():
        generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
