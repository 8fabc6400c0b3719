"""Which checkpoints stay: small callables over the committed ones, newest first; ``|`` joins.

A policy sees names; one that needs more asks ``look`` for a checkpoint's manifest. What cannot
be read (None) is never a reason to remove something else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from checkpoints.errors import ArgumentError
from checkpoints.manifest import Manifest
from checkpoints.naming import CheckpointName
from checkpoints.tree import unpack

Names = Sequence[CheckpointName]
Look = Callable[[CheckpointName], Manifest | None]


Keep = Callable[[Names], Collection[CheckpointName]]
"""Any callable from names to those that stay; :class:`KeepPolicy` can look inside, too."""


class KeepPolicy:
    """A policy: :meth:`select` says which of the committed checkpoints stay."""

    def select(self, newest_first: Names, look: Look) -> Collection[CheckpointName]:
        """The checkpoints to keep; ``look`` returns what is known of one."""
        raise NotImplementedError

    def __call__(self, newest_first: Names) -> Collection[CheckpointName]:
        return self.select(newest_first, lambda name: None)

    def __or__(self, other: KeepPolicy) -> KeepPolicy:
        return _Union((self, other))


@dataclass(frozen=True)
class _Union(KeepPolicy):
    policies: tuple[KeepPolicy, ...]

    def select(self, newest_first: Names, look: Look) -> Collection[CheckpointName]:
        return {name for policy in self.policies for name in policy.select(newest_first, look)}


@dataclass(frozen=True)
class LatestN(KeepPolicy):
    """Keep the ``count`` newest.

    >>> names = [CheckpointName(step, 0, "n") for step in (30, 20, 10)]
    >>> [name.step for name in LatestN(2)(names)]
    [30, 20]
    """

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ArgumentError(f"LatestN({self.count}): at least one checkpoint has to stay")

    def select(self, newest_first: Names, look: Look) -> Collection[CheckpointName]:
        return newest_first[: self.count]


@dataclass(frozen=True)
class EveryNSteps(KeepPolicy):
    """Keep those whose step is a multiple of ``count``."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ArgumentError(f"EveryNSteps({self.count}): it has to be positive")

    def select(self, newest_first: Names, look: Look) -> Collection[CheckpointName]:
        return [name for name in newest_first if name.step % self.count == 0]


@dataclass(frozen=True)
class EveryNSeconds(KeepPolicy):
    """Keep one for every ``seconds`` of the time at which they were written: the first of each.

    A clock that jumped makes it keep more, never fewer.
    """

    seconds: float

    def __post_init__(self) -> None:
        if not (self.seconds > 0 and math.isfinite(self.seconds)):
            raise ArgumentError(f"EveryNSeconds({self.seconds}): it has to be positive")

    def select(self, newest_first: Names, look: Look) -> Collection[CheckpointName]:
        kept: list[CheckpointName] = []
        last_s = -math.inf
        for name in reversed(newest_first):
            manifest = look(name)
            if manifest is None:
                kept.append(name)
            elif abs(manifest.wall_time_s - last_s) >= self.seconds:
                kept.append(name)
                last_s = manifest.wall_time_s
        return kept


@dataclass(frozen=True)
class BestN(KeepPolicy):
    """Keep the ``count`` best by a number in the saved state, at ``metric``: a path with ``/``.

    ``BestN(2, "run/loss")`` looks at ``state["run"]["loss"]``. Those without it are not kept for
    its sake, NaN is worse than everything; ``largest=True`` where more is better.
    """

    count: int
    metric: str
    largest: bool = False

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ArgumentError(f"BestN({self.count}): at least one checkpoint has to stay")

    def select(self, newest_first: Names, look: Look) -> Collection[CheckpointName]:
        values = {name: self._value(look(name)) for name in newest_first}
        known = {name: value for name, value in values.items() if value is not None}
        sign = -1 if self.largest else 1
        order = sorted(known, key=lambda n: (math.isnan(known[n]), sign * known[n]))
        return order[: self.count]

    def _value(self, manifest: Manifest | None) -> float | None:
        if manifest is None:
            return None
        item: Any = unpack(manifest.tree, lambda path, name: None)
        for key in self.metric.split("/"):
            if not isinstance(item, dict) or key not in item:
                return None
            item = item[key]
        return float(item) if isinstance(item, (int, float)) else None


def to_remove(
    newest_first: Names, keep: Keep, look: Look = lambda name: None
) -> tuple[CheckpointName, ...]:
    """What a policy gives up, oldest first. Never the newest, whatever the policy says."""
    chosen = keep.select(newest_first, look) if isinstance(keep, KeepPolicy) else keep(newest_first)
    kept = {*chosen, *newest_first[:1]}
    return tuple(name for name in reversed(newest_first) if name not in kept)
