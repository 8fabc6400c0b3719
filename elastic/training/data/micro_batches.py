"""What a user's ``DataLoader`` reads: this rank's micro-batches, from the position on."""

from __future__ import annotations

from collections.abc import Iterator

from elastic.training.data.sampler import ElasticSampler, MicroShare
from elastic.training.data.seeding import SeededBatch
from elastic.training.data.source import DataSource, ReplacedBatches


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
