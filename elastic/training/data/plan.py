"""Assigns an epoch's positions to ranks: arithmetic without torch.

Step t of an epoch has the global positions ``[t*B, min((t+1)*B, N))`` in every world.
A world only determines how they are divided: each rank takes a contiguous range. So the world may
change between any two steps, and every sample counts exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic.errors import ConfigError

Span = tuple[int, int]
"""Positions ``start <= p < stop``."""


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """A job's position in its data: all steps before ``step`` of ``epoch`` are committed."""

    epoch: int = 0
    step: int = 0


def split(start: int, stop: int, part: int, parts: int) -> Span:
    """Part ``part`` of ``parts`` of a span. Parts are contiguous; sizes differ by at most one.

    >>> [split(0, 10, part, 3) for part in range(3)]
    [(0, 4), (4, 7), (7, 10)]
    """
    size, longer = divmod(stop - start, parts)
    first = start + part * size + min(part, longer)
    return first, first + size + (part < longer)


def check_world(rank: int, world: int) -> None:
    """Raise ConfigError unless ``0 <= rank < world``."""
    if world < 1 or not 0 <= rank < world:
        raise ConfigError(
            f"rank {rank} does not exist in a world of {world}",
            hint=f"ranks go from 0 to {max(world - 1, 0)}",
        )


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """An epoch of ``n`` samples in global batches of ``global_batch``.

    With ``shards`` = V, a global batch consists of V fixed slices, and ranks own contiguous ranges
    of slices; otherwise, ranks own ranges of samples. ``drop_last`` drops the last step if it is
    not full. An epoch ends after ``max_steps`` at the latest; samples beyond them are not read.

    Raises ConfigError for an empty dataset and for invalid sizes.
    """

    n: int
    global_batch: int
    drop_last: bool = False
    shards: int | None = None
    max_steps: int | None = None

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ConfigError(
                f"the dataset is empty ({self.n} samples)",
                hint="check the path and filter of the dataset",
            )
        if self.global_batch < 1:
            raise ConfigError(
                f"global_batch is {self.global_batch}", hint="it must be at least 1 sample"
            )
        if self.drop_last and self.n < self.global_batch:
            raise ConfigError(
                f"drop_last leaves no step: {self.n} samples, global batch of {self.global_batch}",
                hint="use drop_last=False or a smaller global_batch",
            )
        if self.shards is not None and not 1 <= self.shards <= self.global_batch:
            raise ConfigError(
                f"{self.shards} shards cannot divide a global batch of {self.global_batch}",
                hint=f"use 1 to {self.global_batch} shards",
            )
        if self.max_steps is not None and self.max_steps < 1:
            raise ConfigError(f"max_steps is {self.max_steps}", hint="it must be at least 1 step")

    @property
    def steps(self) -> int:
        """The number of steps of an epoch, the same in every world."""
        steps = self.n // self.global_batch if self.drop_last else -(-self.n // self.global_batch)
        return steps if self.max_steps is None else min(steps, self.max_steps)

    @property
    def samples(self) -> int:
        """The number of samples that an epoch reads: ``n`` minus dropped ones."""
        return min(self.n, self.steps * self.global_batch)

    def span(self, step: int) -> Span:
        """The global positions of ``step``; only the last step of an epoch may be smaller."""
        if not 0 <= step < self.steps:
            raise ConfigError(f"step {step} is outside the epoch of {self.steps} steps")
        return step * self.global_batch, min((step + 1) * self.global_batch, self.n)

    @property
    def max_world(self) -> int:
        """The largest world of which each rank has a part of a full step."""
        return self.global_batch if self.shards is None else min(self.global_batch, self.shards)

    def check_world(self, rank: int, world: int) -> None:
        """Raise ConfigError unless each of ``world`` ranks has a part of a full step."""
        check_world(rank, world)
        if world > self.global_batch:
            raise ConfigError(
                f"a global batch of {self.global_batch} is smaller than the world of {world} ranks",
                hint=f"raise global_batch to at least {world}, or run on fewer ranks",
            )
        if self.shards is not None and world > self.shards:
            raise ConfigError(
                f"{self.shards} shards are fewer than the world of {world} ranks",
                hint=f"use at least {world} shards, or run on fewer ranks",
            )

    def share(self, start: int, stop: int, rank: int, world: int) -> Span:
        """The share of ``rank`` in the step ``[start, stop)``; may be empty in the last step."""
        if self.shards is None:
            return split(start, stop, rank, world)
        first, last = split(0, self.shards, rank, world)
        return self._shard(start, stop, first)[0], self._shard(start, stop, last - 1)[1]

    def micro_batches(
        self, start: int, stop: int, rank: int, world: int, micro_batch: int | None = None
    ) -> list[Span]:
        """The share of ``rank`` divided into micro-batches, the same number on every rank.

        At most ``micro_batch`` samples each; None: the complete share. An empty span denotes
        a micro-batch that must run for its collectives, and must not count. With
        ``shards`` each micro-batch is one shard and ``micro_batch`` is ignored.
        """
        count = self.micro_batch_count(start, stop, world, micro_batch)
        if self.shards is None:
            first, last = self.share(start, stop, rank, world)
            return [split(first, last, part, count) for part in range(count)]
        owned = range(*split(0, self.shards, rank, world))
        spans = [self._shard(start, stop, shard) for shard in owned]
        return spans + [(start, start)] * (count - len(spans))

    def micro_batch_count(
        self, start: int, stop: int, world: int, micro_batch: int | None = None
    ) -> int:
        """The number of micro-batches of each rank of ``world`` in the step ``[start, stop)``."""
        # Rank 0 has the largest share, both of samples and of shards.
        if self.shards is not None:
            first, last = split(0, self.shards, 0, world)
            return last - first
        if micro_batch is None:
            return 1
        first, last = split(start, stop, 0, world)
        return -(-(last - first) // micro_batch)

    def _shard(self, start: int, stop: int, shard: int) -> Span:
        assert self.shards is not None
        return split(start, stop, shard, self.shards)
