"""When to save: small callables over one :class:`Moment`, composable with ``|``.

Each looks at a moment between two steps and nothing else. Writers that save together have to
agree on the answer: policies that look at time or at what is in flight are asked by one rank,
which tells the others with what they exchange anyway; ``needs_agreement`` says which those are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from checkpoints.errors import ArgumentError


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What is known between two steps. Times are of one monotonic clock."""

    step: int  # steps done
    now_s: float
    began_s: float  # when this history's observation began
    saved_step: int  # the step of the last save, or where the job began
    saved_s: float  # when that was
    in_flight: int = 0  # saves under way
    preempted: bool = False  # this node or job is asked to go
    save_cost_s: float = 0.0  # what a save costs training, measured; 0: not known yet
    failures: int = 0  # failures since ``began_s``
    previous_step: int | None = None  # steps done at the moment before this one; one less

    def has_passed(self, count: int) -> bool:
        """Whether a multiple of ``count`` steps was reached since the moment before.

        >>> at = Moment(step=12, previous_step=8, now_s=0, began_s=0, saved_step=0, saved_s=0)
        >>> at.has_passed(10), at.has_passed(7)
        (True, False)
        """
        previous = self.step - 1 if self.previous_step is None else self.previous_step
        return self.step // count > previous // count


class When:
    """A policy: call it with a moment; True means save now."""

    needs_agreement = True

    def __call__(self, moment: Moment) -> bool:
        raise NotImplementedError

    def __or__(self, other: When) -> When:
        return _Any((*_parts(self), *_parts(other)))


def split(when: When) -> tuple[When | None, When | None]:
    """The part of a policy that every writer can ask for itself, and what one has to ask for all.

    >>> split(EverySteps(5) | EverySeconds(60))
    (EverySteps(count=5), EverySeconds(seconds=60))
    >>> split(EverySteps(5))
    (EverySteps(count=5), None)
    """
    alone = [part for part in _parts(when) if not part.needs_agreement]
    agreed = [part for part in _parts(when) if part.needs_agreement]
    return _joined(alone), _joined(agreed)


def _parts(when: When) -> tuple[When, ...]:
    return when.policies if isinstance(when, _Any) else (when,)


def _joined(parts: list[When]) -> When | None:
    if len(parts) < 2:
        return parts[0] if parts else None
    return _Any(tuple(parts))


@dataclass(frozen=True)
class _Any(When):
    policies: tuple[When, ...]

    @property
    def needs_agreement(self) -> bool:  # type: ignore[override]
        return any(policy.needs_agreement for policy in self.policies)

    def __call__(self, moment: Moment) -> bool:
        return any(policy(moment) for policy in self.policies)


@dataclass(frozen=True)
class EverySteps(When):
    """After every ``count`` steps, counted from 0, or at the first moment after: the same steps on
    every rank."""

    count: int
    needs_agreement = False

    def __post_init__(self) -> None:
        _positive("EverySteps", self.count)

    def __call__(self, moment: Moment) -> bool:
        return moment.step > moment.saved_step and moment.has_passed(self.count)


@dataclass(frozen=True)
class EverySeconds(When):
    """When the last save is ``seconds`` ago."""

    seconds: float

    def __post_init__(self) -> None:
        _positive("EverySeconds", self.seconds)

    def __call__(self, moment: Moment) -> bool:
        return moment.step > moment.saved_step and moment.now_s - moment.saved_s >= self.seconds


@dataclass(frozen=True)
class Continuous(When):
    """Whenever none is in flight."""

    def __call__(self, moment: Moment) -> bool:
        return moment.step > moment.saved_step and moment.in_flight == 0


@dataclass(frozen=True)
class OnPreemption(When):
    """When this job, or a node of it, is asked to go. Writers hear of that together: there is
    nothing else to agree on."""

    needs_agreement = False

    def __call__(self, moment: Moment) -> bool:
        return moment.step > moment.saved_step and moment.preempted


@dataclass(frozen=True, kw_only=True)
class Automatic(When):
    """As often as pays: the interval of Young and Daly, from measured cost and failure rate.

    ``expected_between_failures_s`` is what is believed before anything failed; it counts as one
    observed failure. The interval stays between the two bounds; until a save was measured it is
    the lower one. J. T. Daly, "A higher order estimate of the optimum checkpoint interval for
    restart dumps", 2006, equation 20.
    """

    expected_between_failures_s: float = 4 * 3600.0
    min_interval_s: float = 30.0
    max_interval_s: float = 3600.0

    def __post_init__(self) -> None:
        _positive("Automatic: expected_between_failures_s", self.expected_between_failures_s)
        _positive("Automatic: min_interval_s", self.min_interval_s)
        if self.max_interval_s < self.min_interval_s:
            raise ArgumentError(
                f"Automatic: max_interval_s {self.max_interval_s} is below min_interval_s "
                f"{self.min_interval_s}"
            )

    def interval_s(self, moment: Moment) -> float:
        """The interval that is best at this moment."""
        watched_s = self.expected_between_failures_s + max(moment.now_s - moment.began_s, 0.0)
        best = best_interval_s(moment.save_cost_s, watched_s / (1 + moment.failures))
        return min(max(best, self.min_interval_s), self.max_interval_s)

    def __call__(self, moment: Moment) -> bool:
        due = moment.now_s - moment.saved_s >= self.interval_s(moment)
        return due and moment.step > moment.saved_step and moment.in_flight == 0


def best_interval_s(cost_s: float, between_failures_s: float) -> float:
    """Training time between two saves that loses least (Daly 2006, equation 20).

    >>> round(best_interval_s(cost_s=2.0, between_failures_s=3600.0))
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
        raise ArgumentError(f"{what}({value}): it has to be a positive number")
