"""``run.loader``: the batches of one rank, whatever the world."""

from __future__ import annotations

import copy
import dataclasses
import queue
import random
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from elastic import errors, torch_private
from elastic.errors import ConfigError, TrainingError
from elastic.torch_private import forget_iterator, not_compiled_methods
from elastic.train.sampler import (
    Draw,
    ElasticSampler,
    GivenOrder,
    MicroShare,
    OwnSampler,
    Position,
    RankStep,
    WholeDataset,
    check_world,
    derive_seed,
    draw_of,
    generators_of_torch,
    preserved_generators,
    size_of,
    split,
    subset_of,
)
from elastic.train.step import Step

# ----------------------------------------------------------------------------
# Keeps the data workers of a loader when the world changes.
#
# torch starts the workers of a ``DataLoader`` with an iterator and ends them with it, unless they
# are persistent: then the next iterator gives them other batches (``_reset`` in
# torch/utils/data/dataloader.py). A change of the world in the middle of an epoch needs other
# batches, not other workers, and starting workers takes longer than the rest of a recovery. So
# they persist within an epoch; at its end they are stopped, unless the user's loader has
# persistent workers.


def make_ready_to_fork() -> None:
    """Initialize torch's shared-memory code before data workers are forked.

    It has a C++ static that is initialized at first use, under a lock of glibc that each thread
    takes at the first use of any static (``__cxa_atexit``). If a worker is forked while a thread of
    this process holds the lock, the worker waits for it forever, in
    ``at::NewProcessWideShmHandle``, and the job hangs: 2 of about 40 jobs that started while a
    low-priority writer thread ran [measured, torch 2.13]. A static initialized before the fork is
    not initialized again.
    """
    with suppress(RuntimeError):  # no shared memory: code that needs it will raise
        # Both uses of shared memory: for samples and for batches.
        torch.zeros(1, device="cpu").share_memory_()  # type: ignore[no-untyped-call]
        torch_private.use_shared_memory()


class DataWorkers:
    """The data workers of one loader, which is a private copy of the user's.

    The owner calls :meth:`enter` before it creates an iterator, and :meth:`stop` when the epoch
    was read to its end, or was left deliberately.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._epoch: int | None = None
        # Loaders that iterate differently (prefetching in a thread) may still read from the
        # iterator of an ended world: their workers end with it, as in torch.
        own_way = not torch_private.iterates_as_torch_does(type(loader))
        self._are_kept = loader.num_workers > 0 and not loader.persistent_workers and not own_way
        if self._are_kept:
            object.__setattr__(loader, "persistent_workers", True)

    def enter(self, epoch: int) -> None:
        """Prepare for a new iterator: keep workers of ``epoch``, end workers of other epochs."""
        if self._epoch != epoch:
            self.stop()
        self._epoch = epoch
        # Batches of the old world that no worker has begun are skipped.
        for tasks in torch_private.unread_tasks(self._loader):
            with suppress(queue.Empty):
                while True:
                    tasks.get_nowait()

    def stop(self) -> None:
        """End the workers with the last iterator, as torch does by default."""
        if self._are_kept:
            torch_private.forget_iterator(self._loader)


# ----------------------------------------------------------------------------
# Describes the data of a user's ``DataLoader``, and replaces the loader's batches.

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
    has_batch_size: bool = True  # of samples, or of undivided batches; else it is unknown

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


Ordering: TypeAlias = "Callable[[int], Iterable[int] | Iterable[Sequence[int]] | torch.Tensor]"
"""The dataset indices of an epoch, or its batches of indices, by the epoch's number."""


def describe(loader: object, order: Ordering | None = None) -> DataSource:
    """Read a loader's order and batch size; with ``order``, its sampler has no effect.

    The batches of a batch sampler of the user's own class are not divided: each is one unit of the
    plan, so ``batch_size`` is 1. Raises ConfigError, with an alternative, for a loader whose order
    is not a function of a position: iterable datasets, and samplers that cannot be repeated.
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
        if isinstance(replaced, ReplacedBatches):  # it was changed in place, and is passed again
            return replaced.source if order is None else _ordered(replaced.source, order)
    if order is not None:
        return _ordered(_unordered(loader), order)
    batches: object = loader.batch_sampler
    if batches is None:
        return _without_collation(loader)
    if type(batches) is BatchSampler:
        return _with_sampler(loader.dataset, batches)
    draw = OwnSampler(batches, loader.dataset, size_of(loader.dataset))
    if not draw.is_batched:
        raise ConfigError(
            f"batch_sampler={type(batches).__name__} yields single indices, not lists of them",
            hint="DataLoader(dataset, batch_size=…, sampler=…)",
        )
    return _of_batches(loader.dataset, draw)


def _unordered(loader: DataLoader[Any]) -> DataSource:
    """The batches of a loader whose sampler is not used."""
    samples = size_of(loader.dataset)
    batches: Any = loader.batch_sampler
    collation = Collation.SAMPLES
    if batches is None:
        batches = loader.sampler
        collation = Collation.LIST if hasattr(batches, "batch_size") else Collation.ITEM
    size = 1 if collation is Collation.ITEM else getattr(batches, "batch_size", None)
    return DataSource(
        dataset=loader.dataset,
        batch_size=size if isinstance(size, int) else 1,
        drop_last=getattr(batches, "drop_last", False) is True,
        shuffle=True,
        draw=WholeDataset(samples, shuffle=True),
        samples=samples,
        subset=subset_of(loader.dataset),
        collation=collation,
        has_batch_size=isinstance(size, int),
    )


def _ordered(source: DataSource, order: Ordering) -> DataSource:
    """The same data in another order."""
    errors.function(
        "run.loader(…, order=…)", order, hint="order=lambda epoch: [the epoch's sample indices]"
    )
    draw = GivenOrder(order, source.samples)
    if not draw.is_batched:
        return dataclasses.replace(source, draw=draw)
    is_list = source.collation is not Collation.SAMPLES
    return dataclasses.replace(
        source,
        draw=draw,
        batch_size=1,
        drop_last=False,
        has_batch_size=True,
        collation=Collation.LIST if is_list else source.collation,
    )


def _without_collation(loader: DataLoader[Any]) -> DataSource:
    """``batch_size=None``: torch passes the sampler's values to the dataset one at a time."""
    sampler: object = loader.sampler
    if type(sampler) is BatchSampler:
        source = _with_sampler(loader.dataset, sampler)
        return dataclasses.replace(source, collation=Collation.LIST)
    source = _with_sampler(loader.dataset, BatchSampler(loader.sampler, 1, drop_last=False))
    if isinstance(source.draw, OwnSampler) and source.draw.is_batched:
        source = _of_batches(loader.dataset, source.draw)
        return dataclasses.replace(source, collation=Collation.LIST)
    return dataclasses.replace(source, collation=Collation.ITEM)


def _of_batches(dataset: Dataset[Any], draw: OwnSampler) -> DataSource:
    return DataSource(
        dataset=dataset,
        batch_size=1,
        drop_last=False,
        shuffle=True,
        draw=draw,
        samples=size_of(dataset),
        subset=subset_of(dataset),
    )


def _with_sampler(dataset: Dataset[Any], batches: BatchSampler) -> DataSource:
    sampler: object = batches.sampler
    samples = size_of(dataset)
    seed = global_batch = None
    draw: Draw
    if isinstance(sampler, ElasticSampler):
        shuffle, seed, global_batch = sampler.shuffle, sampler.seed, sampler.plan.global_batch
        draw = sampler.draw
    elif type(sampler) is DistributedSampler:
        shuffle, seed = sampler.shuffle, sampler.seed
        draw = WholeDataset(samples, shuffle=shuffle)
    else:
        shuffle = isinstance(sampler, RandomSampler)
        draw = draw_of(sampler, dataset, samples)
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


# ----------------------------------------------------------------------------
# Evaluation over all ranks: each sample on exactly one rank, without padding.


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
    is_batched = isinstance(source.draw, OwnSampler) and source.draw.is_batched
    has_items = is_batched or source.collation is Collation.ITEM
    batches: Sampler[list[int]]
    batches = _Batches(part, source.batch_size, is_even, has_items=has_items)
    if isinstance(source.draw, OwnSampler) and is_batched:
        batches = _OwnBatches(batches, source.draw.batches())
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


class _OwnBatches(Sampler[list[int]]):
    """The batches of a part of a batch sampler's."""

    def __init__(self, numbers: _Batches, batches: Sequence[list[int]]) -> None:
        self._numbers, self._batches = numbers, batches

    def __iter__(self) -> Iterator[list[int]]:
        return (self._batches[number] for (number,) in self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)


# ----------------------------------------------------------------------------
# A second loader, read inside the steps of the first: ``for a, b in zip(loader_a, loader_b)``.
#
# The step belongs to the first loader. The second loader yields its next batches when they are
# requested within that step, and advances when the step commits. A fault resets both positions, so
# a repeated step reads the same batches from both.
#
# A pass over the second loader begins with an iterator and need not end with the first loader's:
# it spans several of them (``next(b)``), ends before one, or is left with one (``zip``). Therefore
# the start of its next iterator has a separate rule: the first iterator after a restart or a
# recovery resumes at the position; every later one begins a new epoch, if the current one has
# begun.


@dataclass(eq=False)
class Pass:
    """One iterator over a loader, created by the script."""

    resumes: bool  # resumes in the middle of an epoch
    is_first: bool  # the loader's first iterator in this process
    iterator: weakref.ref[Iterator[Any]] | None = None


class Following:
    """Tracks the batches that a loader has yielded within another's steps. One per loader."""

    def __init__(self, sampler: ElasticSampler) -> None:
        self._sampler = sampler
        self._pending: tuple[Step, Position] | None = None  # the position once that step commits
        self._newest: Pass | None = None
        self._resumes = True
        self._has_led = self._has_followed = False  # in this process
        self.follows = False  # saved with the position
        self.resets = 0

    # -- positions ----------------------------------------------------------------------------

    def reset(self) -> None:
        """Called after the position was set: batches yielded before do not count."""
        self._pending = None
        self._resumes = True
        self.resets += 1

    def position(self, step: Step) -> Position:
        """The position of the next batch within ``step``."""
        if self._pending is not None and self._pending[0] is step:
            return self._pending[1]
        return self._sampler.position

    def record_batch(self, step: Step) -> Position:
        """Record one more batch within ``step``. Returns the position after it."""
        at = self.position(step)
        self._pending = (step, Position(at.epoch, at.step + 1))
        self._has_followed = self.follows = True
        return self._pending[1]

    def commit(self, step: Step) -> int | None:
        """Commit the batches yielded within ``step``. Returns their epoch; None: there are none."""
        pending, self._pending = self._pending, None
        if pending is None or pending[0] is not step:
            return None
        self._sampler.seek(pending[1])
        return pending[1].epoch

    def step_committed(self) -> None:
        """Called after a step of this loader has committed."""
        self._has_led, self.follows = True, False

    # -- passes -------------------------------------------------------------------------------

    def new_pass(self) -> Pass:
        """Called when the script creates an iterator."""
        created = self._newest = Pass(self._resumes, is_first=self._newest is None)
        self._resumes = False
        if self.follows and not created.resumes:
            self.end()
        return created

    def release(self, passed: Pass) -> None:
        """The iterator does not follow another loader; a later one may still resume."""
        self._resumes = self._resumes or (passed is self._newest and passed.resumes)

    def check_leads(self) -> None:
        """Raise TrainingError for a loader that follows another one."""
        if self._has_followed:
            raise self.not_within_a_step()

    def not_within_a_step(self) -> TrainingError:
        """The error for a batch that is requested while the first loader has no step."""
        return TrainingError(
            "this loader yields batches within the steps of another loader, but one was "
            "requested outside of a step",
            hint="request it inside the loop over the first loader; for another use, create a "
            "separate loader: run.loader(DataLoader(…)); to evaluate, use run.shard(loader)",
        )

    def start(self, passed: Pass, *, epochs_are_counted: bool) -> None:
        """Called when the first batch of a pass is requested."""
        if self._has_led:
            raise TrainingError(
                "this loader has defined steps, but is now read within a step of another loader",
                hint="create a separate loader for each use: run.loader(DataLoader(…))",
            )
        self._resumes = False
        is_over = self._sampler.step == self._sampler.plan.steps
        if not passed.resumes or (is_over and not epochs_are_counted):
            self.end()

    def end(self) -> None:
        """End the pass: the next one reads the next epoch, unless this epoch has not begun."""
        at = self._sampler.position if self._pending is None else self._pending[1]
        self._pending = None
        if at.step:
            self._sampler.seek(Position(at.epoch + 1, 0))

    def is_newest(self, passed: Pass) -> bool:
        """Whether this is the script's newest iterator."""
        return passed is self._newest


def same_shares(ours: Sequence[int], others: Sequence[int]) -> bool:
    """Whether each rank has the same fraction of two steps, given the samples of each rank.

    >>> same_shares([4, 4], [2, 2])
    True
    >>> same_shares([4, 4], [2, 1])
    False
    """
    total, total_of_others = sum(ours), sum(others)
    return all(a * total_of_others == b * total for a, b in zip(ours, others, strict=True))


# ----------------------------------------------------------------------------
# Random numbers of data loading as a function of (seed, epoch, sample index), or, if an
# epoch may read a sample more than once, of (seed, epoch, position).
#
# A sample's augmentation must not depend on which rank or data worker reads it, nor on what that
# process read before: otherwise a step repeated in another world would train on other data. The
# seed is sent with the indices, because persistent data workers are not notified of a new epoch;
# the user's dataset, collate_fn and worker_init_fn stay unchanged.
#
# ``random``, ``numpy.random`` and torch's CPU generator are seeded: 8 µs per sample [measured]. So
# is that of this process's GPU, once it is in use: a dataset may draw there, for example after
# ``torch.set_default_device("cuda")``. Generators owned by a dataset (``np.random.default_rng()``)
# are not. Nothing is seeded for datasets that torch's own classes only index: they draw nothing.

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


def _seed_generators(seed: int) -> None:
    # Not torch.manual_seed: it seeds every device, and formats a stack trace for each that is not
    # initialized.
    for generator in generators_of_torch():
        generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


# ----------------------------------------------------------------------------
# What a user's ``DataLoader`` reads: this rank's micro-batches, from the position on.


class DrivenSampler(ElasticSampler):
    """The sampler of a loader whose epochs a run drives."""

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: ``run.epochs`` sets the epoch, and scripts may keep their call."""


class MicroBatches(ReplacedBatches):
    """The batch sampler in the user's DataLoader: this rank's micro-batches.

    With a ``seed`` each sample is read with its own random state.
    """

    def __init__(
        self, source: DataSource, sampler: ElasticSampler, micro_batch: int | None, seed: int | None
    ) -> None:
        super().__init__(source)
        self.sampler = sampler
        self.times_read = 0
        self._micro_batch = micro_batch
        self._seed = seed

    def __iter__(self) -> Iterator[list[int]]:
        self.times_read += 1
        steps = self.sampler.steps(
            self._micro_batch
        )  # read the position now: data workers read ahead
        return (self._batch(micro, part.epoch) for part in steps for micro in part.micro_batches)

    def _batch(self, micro: MicroShare, epoch: int) -> list[int]:
        indices = micro.indices or (micro.filler,)
        if self._seed is None:
            return list(indices)
        first = micro.first if self.sampler.draw.repeats else None
        return SeededBatch(indices, self._seed, epoch, first)

    def __len__(self) -> int:
        """The number of batches of a complete epoch in the current world."""
        plan, world = self.sampler.plan, self.sampler.num_replicas
        return sum(
            plan.micro_batch_count(*plan.span(step), world, self._micro_batch) * times
            for step, times in ((0, plan.steps - 1), (plan.steps - 1, 1))
        )


# ----------------------------------------------------------------------------
# A user's ``DataLoader``, distributed over a changing world.
#
# The loader keeps its dataset, workers and collate_fn. Only its batches are replaced, by this
# rank's micro-batches from the position to the end of the epoch. The description of a batch (step,
# samples, weight) is computed here from the same plan, and does not pass through the data workers.


class RankWeights(Enum):
    """How much the gradients of each rank count in their sum over the ranks."""

    SAMPLES = "samples"  # its fraction of the step's samples: the loss is a mean over a rank's
    EQUAL = "equal"  # 1 / ranks, as in DDP: the loss is normalised over all ranks
    LARGEST = "largest"  # 1 / the largest world's ranks: the loss is scaled by their ratio, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """This rank's part of the current step of a loader.

    Positions are those of samples in the epoch's order, from 0. Those of a rank are contiguous,
    and ranks follow each other: together they are the step's.
    """

    epoch: int
    step: int
    """Within the epoch, from 0."""
    ranks: int
    """The number of ranks among which the step is divided (of replicas, with a mesh)."""
    total: int
    """Samples of all ranks in the step."""
    positions: range
    """Those of this rank in the step; empty if the step has fewer samples than ranks."""
    micro_batches: tuple[range, ...]
    """The positions of each micro-batch, the same number on every rank. An empty one reads a
    filler, so that its collectives run, and must not count."""
    micro_batch: int
    """The current micro-batch, from 0."""

    mean_weights: tuple[float, ...]
    """For each micro-batch, the factor of a loss that is the mean over its samples: the gradients
    of all become those of the mean over the step's ``total`` samples. 0 for a filler."""


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """Description of one batch of this rank: micro-batch ``micro_batch`` of ``part``."""

    part: RankStep
    micro_batch: int
    is_last_step: bool  # of the epoch
    weights: RankWeights = RankWeights.SAMPLES
    largest_world: int = 1

    @property
    def epoch(self) -> int:
        return self.part.epoch

    @property
    def step(self) -> int:
        """The step within the epoch, from 0."""
        return self.part.step

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of this step, the same on every rank."""
        return len(self.part.micro_batches)

    @property
    def is_last_micro_batch(self) -> bool:
        return self.micro_batch == self.micro_batches - 1

    @property
    def indices(self) -> tuple[int, ...]:
        """The dataset indices that count; empty if the batch is a filler."""
        return self.part.micro_batches[self.micro_batch].indices

    @property
    def rank_indices(self) -> tuple[int, ...]:
        """The dataset indices of this rank in the complete step."""
        return self.part.indices

    @property
    def samples(self) -> int:
        """Samples of this micro-batch; if 0, it has one filler sample whose loss must be masked."""
        return len(self.indices)

    @property
    def rank_samples(self) -> int:
        """Samples of this rank in the complete step."""
        return self.part.samples

    @property
    def global_samples(self) -> int:
        """Samples of all ranks in the step."""
        return self.part.global_samples

    @property
    def weight(self) -> float:
        """The weight of this micro-batch's loss within the rank's, 0 to 1. Equal weights: 1, or 0
        for a filler."""
        if not self.samples or self.weights is not RankWeights.SAMPLES:
            return float(self.samples > 0)
        return self.samples / self.rank_samples

    @property
    def rank_share(self) -> float:
        """The rank's fraction of the global batch, 0 to 1."""
        return self.rank_samples / self.global_samples

    @property
    def rank_weight(self) -> float:
        """The weight of the rank's gradients, 0 to 1; those of all ranks add up to 1, or to less
        with the weights of the largest world."""
        if self.weights is RankWeights.SAMPLES:
            return self.rank_share
        return 1 / (self.part.ranks if self.weights is RankWeights.EQUAL else self.largest_world)

    @property
    def share(self) -> Share:
        """This rank's part of the step."""
        return Share(
            epoch=self.epoch,
            step=self.step,
            ranks=self.part.ranks,
            total=self.global_samples,
            positions=self.part.positions,
            micro_batches=tuple(
                range(micro.first, micro.first + len(micro.indices))
                for micro in self.part.micro_batches
            ),
            micro_batch=self.micro_batch,
            mean_weights=tuple(map(self._mean_weight, self.part.micro_batches)),
        )

    def _mean_weight(self, micro: MicroShare) -> float:
        if not micro.indices:
            return 0.0
        if self.weights is RankWeights.SAMPLES:
            return len(micro.indices) / self.rank_samples
        return len(micro.indices) * self.part.ranks / self.global_samples


def _size(name: str, value: object, unit: str) -> int | None:
    hint = f"it must be at least 1 {unit}"
    return None if value is None else errors.whole_number(f"{name}=", value, least=1, hint=hint)


def _weights(given: str) -> RankWeights:
    try:
        return RankWeights(given)
    except ValueError:
        raise ConfigError(
            f"weights={given!r} of ranks is unknown",
            hint='use "samples" for a loss that is a mean over a rank\'s samples, or "equal" for '
            "one that is normalised over all ranks",
        ) from None


@not_compiled_methods
class ElasticLoader:
    """The loader that ``run.loader(…)`` returns.

    ``loader`` is a ``DataLoader``, or any iterable that yields the batches of the ``DataLoader``
    passed as ``dataloader`` one for one and in order; that ``DataLoader`` is changed in place.
    ``global_batch`` defaults to batch_size × ``largest_world`` × ``micro_batches``; a step is one
    micro-batch unless ``micro_batch``, its largest size, or ``micro_batches``, their number in a
    full step, is given. ``order``, ``weights`` and ``whole_batches`` are as in ``run.loader``.

    With ``max_steps`` an epoch ends after at most that many steps, in every world and after every
    recovery. So does ``itertools.islice(loader, 9)`` below ``run.epochs``; ``if i == 9: break``
    counts from where the loop resumes instead, and so runs more steps after a recovery::

        loader = run.loader(DataLoader(…), max_steps=9)   # len(loader) is at most 9
        for x, y in loader:
            …

    A resumed job may change it: the current epoch then ends at the new step, or immediately.

    ``drive`` implements iteration: the run wraps batches in its steps. Without it the loader works
    in a world of one: each step is done when the next batch is requested, and the next epoch
    follows the last step.

    Raises ConfigError for a loader that cannot be distributed, an empty dataset and invalid sizes.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        dataloader: DataLoader[Any] | None = None,
        seed: int = 0,
        largest_world: int = 1,
        global_batch: int | None = None,
        micro_batch: int | None = None,
        micro_batches: int | None = None,
        order: Ordering | None = None,
        weights: str = RankWeights.SAMPLES.value,
        whole_batches: bool = False,
        max_steps: int | None = None,
        drive: Callable[[ElasticLoader], Iterator[Any]] | None = None,
        index: Callable[[ElasticLoader], int] | None = None,
        share_is_read: Callable[[], object] | None = None,
    ) -> None:
        global_batch = _size("global_batch", global_batch, "sample")
        micro_batch = _size("micro_batch", micro_batch, "sample")
        micro_batches = _size("micro_batches", micro_batches, "micro-batch")
        max_steps = _size("max_steps", max_steps, "step")
        self.weights, self._largest_world = _weights(weights), largest_world
        source = describe(loader if dataloader is None else dataloader, order)
        if source.collation is Collation.ITEM:
            if micro_batch not in (None, 1) or micro_batches is not None:
                given = "micro_batch" if micro_batches is None else "micro_batches"
                raise ConfigError(
                    f"{given} is {micro_batch or micro_batches} for a DataLoader with "
                    "batch_size=None",
                    hint="omit it: each item of the dataset is already a batch, and a micro-batch; "
                    "global_batch= is the number of them in a step",
                )
            micro_batch = 1
        if micro_batch is not None and micro_batches is not None:
            raise ConfigError(
                f"micro_batch={micro_batch} and micro_batches={micro_batches}: both divide a step",
                hint="micro_batch= is the largest number of samples of one, micro_batches= the "
                "number of them in each step",
            )
        if whole_batches and micro_batch is not None:
            raise ConfigError(
                f"micro_batch={micro_batch} and whole_batches=True: both divide a step",
                hint="omit micro_batch=: a whole batch has batch_size samples",
            )
        if global_batch is None:
            if not source.has_batch_size:
                raise ConfigError(
                    "the batch size is unknown: the DataLoader has a batch sampler of its own, and "
                    "order= returns single indices",
                    hint="run.loader(…, global_batch=…), or an order of lists, one for each batch",
                )
            each = source.batch_size * largest_world * (micro_batches or 1)
            global_batch = source.global_batch or each
        self.sampler = DrivenSampler(
            source.dataset,
            num_replicas=1,
            rank=0,
            shuffle=source.shuffle,
            seed=seed if source.seed is None else source.seed,
            drop_last=source.drop_last,
            global_batch=global_batch,
            shards=largest_world * (micro_batches or 1) if whole_batches else None,
            max_steps=max_steps,
            micro_batches=micro_batches or 1,
            draw=source.draw,
            subset=source.subset,
        )
        self._source = source
        self.plan = self.sampler.plan
        self.has_item_batches = source.collation is Collation.ITEM
        self.following = Following(self.sampler)
        # Since the last pass began. Together they begin one of which no batch is left.
        self.index_was_read = self.is_iterated = False
        self.rest_is_reached = False  # such a pass has begun, and no other one since
        self._readers: set[tuple[Any, ...]] = set()  # of the index, where a pass resumes at its end
        # Readers of the index since the last commit, and whether they have read it in a step. Those
        # that have read it for a pass, and those that read it in steps, as for a log.
        self._asked: dict[tuple[Any, ...], bool] = {}
        self._starters: set[tuple[Any, ...]] = set()
        self._loggers: set[tuple[Any, ...]] = set()
        # The position was restored at the end of a pass, and none has begun since.
        self.resumes_at_end = False
        self._is_resumed = False  # and no pass has begun since
        self.continues = False  # the current pass is the rest of one that was interrupted
        self.counts_continue = False  # an enumerate of the current pass continues its count there
        # An epoch, and how many batches its first reader takes; None: all.
        self.counted: tuple[int, int] | None = None
        self.micro_batch = micro_batch
        self._seed = seed
        inner = loader if dataloader is None else dataloader
        assert isinstance(inner, DataLoader)
        self._draws = dataloader is not None or not draws_nothing(inner)
        self._batches = MicroBatches(
            source, self.sampler, micro_batch, seed if self._draws else None
        )
        self._inner = over_batches(
            inner,
            self._batches,
            self.sampler,
            source.collation,
            in_place=dataloader is not None,
        )
        self._outer: Iterable[Any] = self._inner if dataloader is None else loader
        self._workers = DataWorkers(self._inner) if dataloader is None else None
        self._passes = 0
        self._current: BatchInfo | None = None  # yielded last, in a step that is not committed
        self._share_is_read = share_is_read
        self._given = loader
        self._drive = drive or _alone
        self._index = index or _index_alone

    def __getattr__(self, name: str) -> Any:
        # dataset, num_workers, a wrapper's attributes. A name with a leading underscore would be
        # this class's own and is missing: an object that copy or pickle creates must not recurse.
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._given, name)

    @property
    def position(self) -> Position:
        """The epoch, and the number of its committed steps."""
        return self.sampler.position

    @property
    def index(self) -> int:
        """The index within the epoch, from 0, of the current step, or of the next one between
        steps.

        For progress bars and a script's own counters, because a pass may begin in the middle of an
        epoch (``enumerate(loader)`` continues its count)::

            for x, y in tqdm(loader, initial=loader.index, total=len(loader)):

        Restores the job's state, as the loop would.
        """
        return self._index(self)

    @property
    def share(self) -> Share:
        """This rank's part of the current step: positions of its samples, the step's total and the
        number of ranks.

        Raises TrainingError outside of a step.
        """
        if self._current is None:
            raise TrainingError(
                "loader.share was read outside of a step of this loader",
                hint="read it inside `for batch in loader` or `for batch in step`",
            )
        if self._share_is_read is not None:
            self._share_is_read()
        return self._current.share

    @property
    def micro_batches_per_epoch(self) -> int:
        """The number of batches that each rank reads in an epoch, at any position. With
        ``micro_batches`` it is the same in each world, else it is that of the current one."""
        return len(self._batches)

    def advance(self) -> None:
        """Advance the position: the step is committed. Raises ConfigError at the epoch's end."""
        self._current = None
        self._asked_in_step()
        self._asked.clear()
        self.index_was_read = False  # in a step, before its update
        self.sampler.advance()
        self.following.step_committed()

    def seek(self, position: Position) -> None:
        """Continue at ``position`` with the next iteration.

        Raises ConfigError if the epoch has no such step.
        """
        self.sampler.seek(position)
        self.following.reset()

    def begin_epoch(self, epoch: int) -> None:
        """Start ``epoch``, or stay in the middle of it if it is the resumed one.

        Raises ConfigError if it is negative.
        """
        self.resumes_at_end = self.rest_is_reached = False
        if epoch != self.position.epoch:
            self.seek(Position(epoch, 0))

    @property
    def is_resumed(self) -> bool:
        """Whether the next pass is the rest of one that was interrupted."""
        return self._is_resumed

    def requests_first(self) -> None:
        """The script requests the first batch of a pass."""
        self.continues, self._is_resumed = self._is_resumed, False

    def resume(self) -> None:
        """The script is called again, at this position."""
        self.resumes_at_end = self.position.step == len(self)
        self._is_resumed = True
        self.index_was_read = self.is_iterated = self.rest_is_reached = False
        for readers in (self._readers, self._asked, self._starters, self._loggers):
            readers.clear()

    def may_be_asked_for_a_pass(self, reader: tuple[Any, ...]) -> bool:
        """Whether it is not known yet for what the script reads :attr:`index` at ``reader``."""
        return reader not in self._starters | self._loggers

    def index_is_reported(self, reader: tuple[Any, ...]) -> None:
        """The script only reports the index at ``reader``: it reads it where it requests batches,
        and not before a pass."""
        self._loggers.add(reader)

    def index_is_read(self, reader: tuple[Any, ...], *, in_step: bool) -> bool:
        """The script reads :attr:`index` at ``reader``. If it does so again, and has requested no
        batch, its pass had no batch left, and this is the next one.

        Returns whether it reads the index of its next pass, although it still holds the iterator of
        the last one, ``in_step``.
        """
        # Not what a step only reports.
        self.index_was_read |= not in_step or reader in self._starters
        if self.resumes_at_end:
            self.resumes_at_end = reader not in self._readers
            self._readers.add(reader)
        self._asked[reader] = in_step
        return in_step and reader in self._starters

    def begin_iteration(self, *, in_step: bool) -> None:
        """The script creates an iterator, in a step that has not ended if ``in_step``: what has
        read the index since the last commit may count its batches. Raises TrainingError if that was
        the index of this step."""
        self.is_iterated = True
        known = self._starters | self._loggers
        if in_step and any(inside and r not in known for r, inside in self._asked.items()):
            raise _index_of_open_step(self.position.step)
        if not in_step:
            self._asked_in_step()  # of a loop that was left in its first step, not committed yet
        self._starters |= self._asked.keys() - self._loggers

    def _asked_in_step(self) -> None:
        """What has read the index in a step, but counts no batches from it, only reports it."""
        self._loggers |= {r for r, in_step in self._asked.items() if in_step} - self._starters

    def begin_pass(self) -> None:
        """Begin a pass whose epochs nobody counts: the next epoch, if this one is complete.

        A complete pass that was restored is repeated from its end, without a batch: the code after
        it, such as an evaluation, was interrupted.
        """
        if self.position.step == len(self) and not self.resumes_at_end:
            self.begin_epoch(self.position.epoch + 1)
        self.resumes_at_end = self.rest_is_reached = False

    def pass_has_ended(self) -> None:
        """The code after the last pass has run: the next pass reads the next epoch."""
        self.resumes_at_end = self.resumes_at_end and not self.rest_is_reached
        self.begin_pass()

    def call_ended(self) -> None:
        """A call of ``run.retry`` is complete, and with it the code after a complete pass."""
        if self.resumes_at_end:
            self.resumes_at_end = False
            self.begin_pass()

    def state_dict(self) -> dict[str, Any]:
        """The position, and everything that it depends on, as JSON values."""
        state = {**self.sampler.state_dict(), "follows": self.following.follows}
        if (begun := self.sampler.begun_order) is not None:
            state["order"] = list(begun)
        return state if self.counted is None else {**state, "counted": list(self.counted)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume where :meth:`state_dict` was taken. Raises ConfigError for other data."""
        self.sampler.load_state_dict(state)
        self.resume()
        self.following.reset()
        self.following.follows = state.get("follows", False)
        begun = state.get("order")
        self.sampler.continue_order((begun[0], begun[1]) if begun is not None else None)
        counted = state.get("counted")
        self.counted = (counted[0], counted[1]) if counted is not None else None

    def __len__(self) -> int:
        """The number of steps of an epoch, the same in every world and at every position."""
        return self.plan.steps

    def __iter__(self) -> Iterator[Any]:
        return self._drive(self)

    def batches(
        self, rank: int, size: int, *, keeps_workers: bool = False
    ) -> Iterator[tuple[BatchInfo, Any]]:
        """The batches of ``rank`` of ``size`` from the position to the end of the epoch.

        The position is read now and not changed; :meth:`advance` changes it. If the pass is left
        before its end and ``keeps_workers`` is set, the data workers wait for the next pass over
        this epoch, or for :meth:`stop_workers`.

        Raises ConfigError if the global batch is smaller than the world, and if the dataset has
        another number of samples than at first; TrainingError if a wrapper does not yield the
        batches of its DataLoader one for one, or if an older pass continues.
        """
        self._source.check_size()
        self.sampler.set_world(rank, size)
        self._passes += 1
        self._current = None
        if self.position.step == self.plan.steps:
            self.stop_workers()
            return iter(())  # do not start data workers
        if self._workers is not None:
            self._workers.enter(self.position.epoch)
        infos = self._infos(self.sampler.steps(self.micro_batch))
        self._inner.generator.manual_seed(
            derive_seed(self._seed, self.position.epoch, self.position.step, rank)
        )
        times_read = self._batches.times_read
        batches = iter(self._outer)
        return self._matched(infos, batches, times_read, self._passes, keeps_workers)

    def stop_workers(self) -> None:
        """End the data workers: no further pass over this epoch follows."""
        if self._workers is not None:
            self._workers.stop()

    def _infos(self, parts: Iterator[RankStep]) -> Iterator[BatchInfo]:
        last = self.plan.steps - 1
        for part in parts:
            for number in range(len(part.micro_batches)):
                yield BatchInfo(part, number, part.step == last, self.weights, self._largest_world)

    def _matched(
        self,
        infos: Iterator[BatchInfo],
        batches: Iterator[Any],
        times_read: int,
        number: int,
        keeps_workers: bool,
    ) -> Iterator[tuple[BatchInfo, Any]]:
        """Yield each batch with its description. ``number``: the number of this pass."""
        try:
            for info in infos:
                if number != self._passes:
                    raise TrainingError(
                        "a loop over the loader continues after a newer loop has begun",
                        hint="finish or leave a loop before you start the next one",
                    )
                with self._read_here():
                    batch = next(batches, _NOTHING)
                if batch is _NOTHING:
                    raise self._mismatch(f"ended before step {info.step} of epoch {info.epoch}")
                if self._batches.times_read == times_read:
                    raise self._mismatch("does not read the DataLoader passed as dataloader=")
                self._current = info
                yield info, batch
            with self._read_here():
                if next(batches, _NOTHING) is not _NOTHING:
                    raise self._mismatch("continued after the last step of the epoch")
            keeps_workers = False
        finally:
            if number == self._passes and not keeps_workers:
                self.stop_workers()

    def _read_here(self) -> AbstractContextManager[None]:
        """Restore this process's random generators, which reading without workers has seeded."""
        seeds_here = self._draws and not self._inner.num_workers
        return preserved_generators() if seeds_here else nullcontext()

    def _mismatch(self, what: str) -> TrainingError:
        return TrainingError(
            f"{type(self._outer).__name__} {what}",
            hint="a wrapper must yield the batches of dataloader= one for one, in order",
        )


_NOTHING = object()


def _index_of_open_step(index: int) -> TrainingError:
    return TrainingError(
        f"loader.index was read before a new iterator was created, in the step of index {index}: a "
        "step that next() has begun ends with the following next(), so the script would count that "
        "batch again",
        hint="end the step before: run.commit() after optimizer.step(), or let a loop request all "
        "batches: for i, batch in enumerate(loader)",
    )


def _index_alone(loader: ElasticLoader) -> int:
    return loader.position.step % len(loader)  # 0 after the last step


def _alone(loader: ElasticLoader) -> Iterator[Any]:
    if loader.position.step == len(loader):
        loader.begin_epoch(loader.position.epoch + 1)
    for info, batch in loader.batches(0, 1):
        yield batch
        if info.is_last_micro_batch:
            loader.advance()
