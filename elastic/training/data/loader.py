"""A user's ``DataLoader``, distributed over a changing world.

The loader keeps its dataset, workers and collate_fn. Only its batches are replaced, by this rank's
micro-batches from the position to the end of the epoch. The description of a batch (step, samples,
weight) is computed here from the same plan, and does not pass through the data workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from elastic import arguments
from elastic.compiling import not_compiled_methods
from elastic.errors import ConfigError, TrainingError
from elastic.training.data.data_workers import DataWorkers
from elastic.training.data.following import Following
from elastic.training.data.micro_batches import DrivenSampler, MicroBatches
from elastic.training.data.plan import Position
from elastic.training.data.randomness import derive_seed
from elastic.training.data.sampler import RankStep
from elastic.training.data.seeding import draws_nothing, preserved_generators
from elastic.training.data.source import (
    Collation,
    describe,
    over_batches,
)


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """Description of one batch of this rank: micro-batch ``micro_batch`` of ``part``."""

    part: RankStep
    micro_batch: int
    is_last_step: bool  # of the epoch

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
        """The weight of this micro-batch's mean loss within the rank's share, 0 to 1."""
        return self.samples / self.rank_samples if self.samples else 0.0

    @property
    def rank_weight(self) -> float:
        """The weight of the rank's share within the global batch, 0 to 1."""
        return self.rank_samples / self.global_samples


def _size(name: str, value: object, unit: str) -> int | None:
    hint = f"it must be at least 1 {unit}"
    return None if value is None else arguments.whole_number(f"{name}=", value, least=1, hint=hint)


@not_compiled_methods
class ElasticLoader:
    """The loader that ``run.loader(…)`` returns.

    ``loader`` is a ``DataLoader``, or any iterable that yields the batches of the ``DataLoader``
    passed as ``dataloader`` one for one and in order; that ``DataLoader`` is changed in place.
    ``global_batch`` defaults to batch_size × ``largest_world``; ``micro_batch`` to the rank's
    share.

    With ``max_steps`` an epoch ends after at most that many steps, in every world and after every
    recovery. ``itertools.islice(loader, 9)`` and ``if i == 9: break`` count from where the loop
    resumes instead, and so run more steps after a recovery::

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
        shards: int | None = None,
        max_steps: int | None = None,
        drive: Callable[[ElasticLoader], Iterator[Any]] | None = None,
        index: Callable[[ElasticLoader], int] | None = None,
    ) -> None:
        global_batch = _size("global_batch", global_batch, "sample")
        micro_batch = _size("micro_batch", micro_batch, "sample")
        max_steps = _size("max_steps", max_steps, "step")
        source = describe(loader if dataloader is None else dataloader)
        if source.collation is Collation.ITEM:
            if micro_batch not in (None, 1):
                raise ConfigError(
                    f"micro_batch is {micro_batch} for a DataLoader with batch_size=None",
                    hint="omit it: each item of the dataset is already a batch",
                )
            micro_batch = 1
        if global_batch is None:
            global_batch = source.global_batch or source.batch_size * largest_world
        self.sampler = DrivenSampler(
            source.dataset,
            num_replicas=1,
            rank=0,
            shuffle=source.shuffle,
            seed=seed if source.seed is None else source.seed,
            drop_last=source.drop_last,
            global_batch=global_batch,
            shards=shards,
            max_steps=max_steps,
            draw=source.draw,
            subset=source.subset,
        )
        self._source = source
        self.plan = self.sampler.plan
        self.has_item_batches = source.collation is Collation.ITEM
        self.following = Following(self.sampler)
        self.index_was_read = False  # since the last pass began
        # The position was restored at the end of a pass, and none has begun since.
        self.resumes_at_end = False
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

        For counters and progress bars, because a pass may begin in the middle of an epoch::

            for i, (x, y) in enumerate(loader, start=loader.index):
            for x, y in tqdm(loader, initial=loader.index, total=len(loader)):

        Restores the job's state, as the loop would.
        """
        return self._index(self)

    def advance(self) -> None:
        """Advance the position: the step is committed. Raises ConfigError at the epoch's end."""
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
        self.resumes_at_end = False
        if epoch != self.position.epoch:
            self.seek(Position(epoch, 0))

    def resume(self) -> None:
        """The script is called again, at this position."""
        self.resumes_at_end = self.position.step == len(self)

    def begin_pass(self) -> None:
        """Begin a pass whose epochs nobody counts: the next epoch, if this one is complete.

        A complete pass that was restored is repeated from its end, without a batch: the code after
        it, such as an evaluation, was interrupted.
        """
        if self.position.step == len(self) and not self.resumes_at_end:
            self.begin_epoch(self.position.epoch + 1)
        self.resumes_at_end = False

    def state_dict(self) -> dict[str, Any]:
        """The position, and everything that it depends on, as JSON values."""
        return {**self.sampler.state_dict(), "follows": self.following.follows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume where :meth:`state_dict` was taken. Raises ConfigError for other data."""
        self.sampler.load_state_dict(state)
        self.resume()
        self.following.reset()
        self.following.follows = state.get("follows", False)

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
                yield BatchInfo(part, number, part.step == last)

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


def _index_alone(loader: ElasticLoader) -> int:
    return loader.position.step % len(loader)  # 0 after the last step


def _alone(loader: ElasticLoader) -> Iterator[Any]:
    if loader.position.step == len(loader):
        loader.begin_epoch(loader.position.epoch + 1)
    for info, batch in loader.batches(0, 1):
        yield batch
        if info.is_last_micro_batch:
            loader.advance()
