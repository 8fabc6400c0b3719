"""Which checkpoints stay: small callables over the names of the committed ones, newest first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from checkpoints.errors import ArgumentError
from checkpoints.naming import CheckpointName

Keep = Callable[[Sequence[CheckpointName]], Collection[CheckpointName]]


@dataclass(frozen=True)
class LatestN:
    """Keep the ``count`` newest.

    >>> names = [CheckpointName(step, 0, "n") for step in (30, 20, 10)]
    >>> [name.step for name in LatestN(2)(names)]
    [30, 20]
    """

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ArgumentError(f"LatestN({self.count}): at least one checkpoint has to stay")

    def __call__(self, newest_first: Sequence[CheckpointName]) -> Collection[CheckpointName]:
        return newest_first[: self.count]


def to_remove(newest_first: Sequence[CheckpointName], keep: Keep) -> tuple[CheckpointName, ...]:
    """What a policy gives up, oldest first. Never the newest, whatever the policy says."""
    kept = {*keep(newest_first), *newest_first[:1]}
    return tuple(name for name in reversed(newest_first) if name not in kept)
