"""Retention policies: which committed checkpoints to keep. Policies compose with ``|``.

A policy receives the names of committed checkpoints, newest first. One that needs more than the
name calls ``read_manifest``, which returns None for a manifest that cannot be read.

:func:`to_remove` applies a policy. Only valid checkpoints count, so a damaged one never displaces
another one, and a checkpoint that cannot be read now is never removed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from checkpoints.errors import ArgumentError
from checkpoints.format.lineage import why_abandoned
from checkpoints.format.manifest import Lineage, Manifest
from checkpoints.format.names import CheckpointName
from checkpoints.format.state_tree import unflatten

CommittedNames = Sequence[CheckpointName]
ManifestReader = Callable[[CheckpointName], Manifest | None]


RetentionFunction = Callable[[CommittedNames], Collection[CheckpointName]]
"""Maps committed names, newest first, to those to keep. A :class:`RetentionPolicy` is one that can
also read manifests."""


class RetentionPolicy:
    """Base class of retention policies: :meth:`select` returns the checkpoints to keep."""

    def select(
        self, newest_first: CommittedNames, read_manifest: ManifestReader
    ) -> Collection[CheckpointName]:
        """The subset of ``newest_first`` to keep."""
        raise NotImplementedError

    def __call__(self, newest_first: CommittedNames) -> Collection[CheckpointName]:
        return self.select(newest_first, lambda name: None)

    def __or__(self, other: RetentionPolicy) -> RetentionPolicy:
        return _Union((self, other))


@dataclass(frozen=True)
class _Union(RetentionPolicy):
    policies: tuple[RetentionPolicy, ...]

    def select(
        self, newest_first: CommittedNames, read_manifest: ManifestReader
    ) -> Collection[CheckpointName]:
        return {
            name for policy in self.policies for name in policy.select(newest_first, read_manifest)
        }


@dataclass(frozen=True)
class LatestN(RetentionPolicy):
    """Keep the ``count`` newest.

    >>> names = [CheckpointName(step, 0, "n") for step in (30, 20, 10)]
    >>> [name.step for name in LatestN(2)(names)]
    [30, 20]

    Raises :class:`ArgumentError` if ``count`` is below 1.
    """

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ArgumentError(f"LatestN({self.count}): count must be at least 1")

    def select(
        self, newest_first: CommittedNames, read_manifest: ManifestReader
    ) -> Collection[CheckpointName]:
        return newest_first[: self.count]


@dataclass(frozen=True)
class EveryNSteps(RetentionPolicy):
    """Keep the first checkpoint at or after each multiple of ``count`` steps: the one that
    :class:`~checkpoints.EverySteps` of the same count saves.

    >>> names = [CheckpointName(step, 0, "n") for step in (2001, 1500, 1002, 500)]
    >>> [name.step for name in EveryNSteps(1000)(names)]
    [2001, 1002]

    Checkpoints that the newest one's lineage abandoned are kept only at exact multiples. Raises
    :class:`ArgumentError` if ``count`` is below 1.
    """

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ArgumentError(f"EveryNSteps({self.count}): count must be positive")

    def select(
        self, newest_first: CommittedNames, read_manifest: ManifestReader
    ) -> Collection[CheckpointName]:
        exact = {name for name in newest_first if name.step % self.count == 0}
        blocks: dict[int, list[CheckpointName]] = {}
        for name in sorted(newest_first, key=lambda name: (name.step, name.generation)):
            if name.step >= self.count:
                blocks.setdefault(name.step // self.count, []).append(name)
        lineage: Lineage = ()
        if any(len({name.generation for name in block}) > 1 for block in blocks.values()):
            manifest = read_manifest(newest_first[0])  # which of them continue the same history
            lineage = manifest.lineage if manifest is not None else ()
        first = {
            next((name for name in block if why_abandoned(name, lineage) is None), None)
            for block in blocks.values()
        }
        return [name for name in newest_first if name in exact or name in first]


@dataclass(frozen=True)
class EveryNSeconds(RetentionPolicy):
    """Keep one checkpoint per interval of ``seconds``, by the wall time at which it was written.

    A jump of the clock makes the policy keep more checkpoints, never fewer. Raises
    :class:`ArgumentError` if ``seconds`` is not positive and finite.
    """

    seconds: float

    def __post_init__(self) -> None:
        if not (self.seconds > 0 and math.isfinite(self.seconds)):
            raise ArgumentError(
                f"EveryNSeconds({self.seconds}): seconds must be positive and finite"
            )

    def select(
        self, newest_first: CommittedNames, read_manifest: ManifestReader
    ) -> Collection[CheckpointName]:
        kept: list[CheckpointName] = []
        last_s = -math.inf
        for name in reversed(newest_first):
            manifest = read_manifest(name)
            if manifest is None:
                kept.append(name)
            elif abs(manifest.wall_time_s - last_s) >= self.seconds:
                kept.append(name)
                last_s = manifest.wall_time_s
        return kept


@dataclass(frozen=True)
class BestN(RetentionPolicy):
    """Keep the ``count`` best checkpoints by a number in the saved state.

    ``metric`` is the path of that number, joined by ``/``: ``BestN(2, "run/loss")`` reads
    ``state["run"]["loss"]``. Smaller is better unless ``largest=True``; NaN ranks last, and
    checkpoints without the metric are not selected. Raises :class:`ArgumentError` if ``count`` is
    below 1.
    """

    count: int
    metric: str
    largest: bool = False

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ArgumentError(f"BestN({self.count}): count must be at least 1")

    def select(
        self, newest_first: CommittedNames, read_manifest: ManifestReader
    ) -> Collection[CheckpointName]:
        values = {name: self._value(read_manifest(name)) for name in newest_first}
        known = {name: value for name, value in values.items() if value is not None}
        sign = -1 if self.largest else 1
        order = sorted(known, key=lambda n: (math.isnan(known[n]), sign * known[n]))
        return order[: self.count]

    def _value(self, manifest: Manifest | None) -> float | None:
        if manifest is None:
            return None
        item: Any = unflatten(manifest.tree, lambda path, name: None)
        for key in self.metric.split("/"):
            if not isinstance(item, dict) or key not in item:
                return None
            item = item[key]
        return float(item) if isinstance(item, (int, float)) else None


class Validity(Enum):
    """What is known about a committed checkpoint."""

    VALID = "valid"
    DAMAGED = "damaged"
    UNKNOWN = "unknown"  # it cannot be read now, or only by a newer version


def to_remove(
    newest_first: CommittedNames,
    keep: RetentionFunction,
    read_manifest: ManifestReader = lambda name: None,
    validity: Callable[[CheckpointName], Validity] = lambda name: Validity.VALID,
) -> tuple[CheckpointName, ...]:
    """The checkpoints that a policy does not keep, oldest first.

    ``validity`` is called for those that the policy keeps and for those to remove. Always kept are
    the newest valid one, those of unknown validity, and damaged ones that would be kept if they
    were valid.
    """
    kept: set[CheckpointName] = set()
    counted = list(newest_first)
    while True:
        chosen = {*_chosen(keep, counted, read_manifest), *counted[:1]}
        kept |= chosen
        if kept.issuperset(newest_first):
            return ()
        invalid = {name for name in chosen if validity(name) is not Validity.VALID}
        if not invalid:
            break
        counted = [name for name in counted if name not in invalid]
    return tuple(
        name
        for name in reversed(newest_first)
        if name not in kept and validity(name) is not Validity.UNKNOWN
    )


def _chosen(
    keep: RetentionFunction, newest_first: CommittedNames, read_manifest: ManifestReader
) -> Collection[CheckpointName]:
    if isinstance(keep, RetentionPolicy):
        return keep.select(newest_first, read_manifest)
    return keep(newest_first)
