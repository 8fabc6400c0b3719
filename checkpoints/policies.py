"""When to save, and what to keep."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from checkpoints.errors import ArgumentError
from checkpoints.intervals import (
    AUTOMATIC_BETWEEN_FAILURES_S,
    AUTOMATIC_MAX_INTERVAL_S,
    AUTOMATIC_MIN_INTERVAL_S,
)
from checkpoints.manifest import Lineage, Manifest, why_abandoned
from checkpoints.names import CheckpointName
from checkpoints.tree import unflatten

# ----------------------------------------------------------------------------
# Retention policies: which committed checkpoints to keep. Policies compose with ``|``.
#
# A policy receives the names of committed checkpoints, newest first. One that needs more than the
# name calls ``read_manifest``, which returns None for a manifest that cannot be read.
#
# :func:`to_remove` applies a policy. Only valid checkpoints count, so a damaged one never
# displaces another one, and a checkpoint that cannot be read now is never removed.

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
    """Keep the first checkpoint of each interval of ``seconds``, by the wall time at which it was
    written. Intervals begin at multiples of ``seconds`` since 1970.

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
        # Fixed intervals, not distances from the last one kept: whether a checkpoint is kept must
        # not depend on an older one that cannot be read for a moment.
        last: float | None = None
        for name in reversed(newest_first):
            manifest = read_manifest(name)
            if manifest is None:
                kept.append(name)
            elif (interval := manifest.wall_time_s // self.seconds) != last:
                kept.append(name)
                last = interval
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
    """The names that a policy selects. Raises :class:`ArgumentError` if it returns anything else,
    such as their steps: no other name would be kept."""
    names = list(newest_first)  # its own: it may sort them
    if isinstance(keep, RetentionPolicy):
        chosen = set(keep.select(names, read_manifest))
    else:
        chosen = set(keep(names))
    if others := [item for item in chosen if not isinstance(item, CheckpointName)]:
        raise ArgumentError(
            f"the retention policy {keep!r} returned {others[0]!r}, which is no CheckpointName",
            hint="Return those of its argument that it keeps.",
        )
    return chosen.intersection(newest_first)


# ----------------------------------------------------------------------------
# Save policies: when to save a checkpoint. Policies compose with ``|``.
#
# A policy is a pure function of a :class:`SaveContext`. All writers of a checkpoint must reach the
# same decision. A policy that depends only on the step reaches it on every rank. One that depends
# on time or on saves in flight (``needs_agreement``) is evaluated by one rank, which shares the
# result with the others in a message that they exchange anyway.


@dataclass(frozen=True, kw_only=True)
class SaveContext:
    """The inputs of a save policy at a step boundary. Times are readings of one monotonic clock."""

    step: int  # completed steps
    now_s: float
    began_s: float  # when observation of failures began
    saved_step: int  # the step of the last save, or the initial step
    saved_s: float  # time of the last save
    in_flight: int = 0  # saves in flight
    preempted: bool = False  # this node or job received a preemption notice
    save_cost_s: float = 0.0  # measured stall per save; 0 if not measured yet
    failures: int = 0  # failures since ``began_s``
    previous_step: int | None = None  # at the previous boundary; None: step - 1

    def crosses_multiple_of(self, count: int) -> bool:
        """Whether a multiple of ``count`` lies after the previous boundary and up to this one.

        >>> at = SaveContext(step=12, previous_step=8, now_s=0, began_s=0, saved_step=0, saved_s=0)
        >>> at.crosses_multiple_of(10), at.crosses_multiple_of(7)
        (True, False)
        """
        previous = self.step - 1 if self.previous_step is None else self.previous_step
        return self.step // count > previous // count


class SavePolicy:
    """Base class of save policies: a callable that returns True to save now."""

    needs_agreement = True

    def __call__(self, context: SaveContext) -> bool:
        raise NotImplementedError

    def __or__(self, other: SavePolicy) -> SavePolicy:
        return _AnyOf((*_parts(self), *_parts(other)))


def split_by_agreement(when: SavePolicy) -> tuple[SavePolicy | None, SavePolicy | None]:
    """Split a policy into (evaluated on every rank, evaluated by one rank for all).

    >>> split_by_agreement(EverySteps(5) | EverySeconds(60))
    (EverySteps(count=5), EverySeconds(seconds=60))
    >>> split_by_agreement(EverySteps(5))
    (EverySteps(count=5), None)
    """
    alone = [part for part in _parts(when) if not part.needs_agreement]
    agreed = [part for part in _parts(when) if part.needs_agreement]
    return _joined(alone), _joined(agreed)


def _parts(when: SavePolicy) -> tuple[SavePolicy, ...]:
    return when.policies if isinstance(when, _AnyOf) else (when,)


def _joined(parts: list[SavePolicy]) -> SavePolicy | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    return _AnyOf(tuple(parts))


@dataclass(frozen=True)
class _AnyOf(SavePolicy):
    policies: tuple[SavePolicy, ...]

    @property
    def needs_agreement(self) -> bool:  # type: ignore[override]
        return any(policy.needs_agreement for policy in self.policies)

    def __call__(self, context: SaveContext) -> bool:
        return any(policy(context) for policy in self.policies)


@dataclass(frozen=True)
class EverySteps(SavePolicy):
    """Save at every multiple of ``count`` steps, or at the first boundary after it.

    Raises :class:`ArgumentError` if ``count`` is not positive.
    """

    count: int
    needs_agreement = False

    def __post_init__(self) -> None:
        _positive("EverySteps", self.count)

    def __call__(self, context: SaveContext) -> bool:
        return context.step > context.saved_step and context.crosses_multiple_of(self.count)


@dataclass(frozen=True)
class EverySeconds(SavePolicy):
    """Save once ``seconds`` have passed since the last save.

    Raises :class:`ArgumentError` if ``seconds`` is not positive and finite.
    """

    seconds: float

    def __post_init__(self) -> None:
        _positive("EverySeconds", self.seconds)

    def __call__(self, context: SaveContext) -> bool:
        elapsed_s = context.now_s - context.saved_s
        return context.step > context.saved_step and elapsed_s >= self.seconds


@dataclass(frozen=True)
class Continuous(SavePolicy):
    """Save whenever no save is in flight."""

    def __call__(self, context: SaveContext) -> bool:
        return context.step > context.saved_step and context.in_flight == 0


@dataclass(frozen=True)
class OnPreemption(SavePolicy):
    """Save on a preemption notice to this job or one of its nodes. All writers receive the notice
    at the same step: the decision needs no agreement."""

    needs_agreement = False

    def __call__(self, context: SaveContext) -> bool:
        return context.step > context.saved_step and context.preempted


@dataclass(frozen=True, kw_only=True)
class Automatic(SavePolicy):
    """Save at the Young/Daly interval, computed from measured save cost and failure rate.

    ``expected_between_failures_s`` is the prior mean time between failures; it weighs as much as
    one observed failure. The interval is clamped to the two bounds; until a save has been measured
    it is the lower bound. J. T. Daly, "A higher order estimate of the optimum checkpoint interval
    for restart dumps", 2006, equation 20.

    Raises :class:`ArgumentError` for times that are not positive and finite, and an upper bound
    below the lower one.
    """

    expected_between_failures_s: float = AUTOMATIC_BETWEEN_FAILURES_S
    min_interval_s: float = AUTOMATIC_MIN_INTERVAL_S
    max_interval_s: float = AUTOMATIC_MAX_INTERVAL_S

    def __post_init__(self) -> None:
        _positive("Automatic: expected_between_failures_s", self.expected_between_failures_s)
        _positive("Automatic: min_interval_s", self.min_interval_s)
        if self.max_interval_s < self.min_interval_s:
            raise ArgumentError(
                f"Automatic: max_interval_s {self.max_interval_s} is below min_interval_s "
                f"{self.min_interval_s}"
            )

    def interval_s(self, context: SaveContext) -> float:
        """The interval to use in this context, in seconds."""
        observed_s = self.expected_between_failures_s + max(context.now_s - context.began_s, 0.0)
        best = optimal_interval_s(context.save_cost_s, observed_s / (1 + context.failures))
        return min(max(best, self.min_interval_s), self.max_interval_s)

    def __call__(self, context: SaveContext) -> bool:
        due = context.now_s - context.saved_s >= self.interval_s(context)
        return due and context.step > context.saved_step and context.in_flight == 0


def optimal_interval_s(cost_s: float, between_failures_s: float) -> float:
    """The training time between two saves that minimises lost time (Daly 2006, equation 20).

    >>> round(optimal_interval_s(cost_s=2.0, between_failures_s=3600.0))
    119
    """
    if cost_s <= 0:
        return 0.0
    if cost_s >= 2 * between_failures_s:
        return between_failures_s
    ratio = cost_s / (2 * between_failures_s)
    young = math.sqrt(2 * cost_s * between_failures_s)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def _positive(what: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ArgumentError(f"{what}({value}): must be positive and finite")
