"""How long a collective may wait for its slowest rank: tightened by what was measured.

Pure. A rank waits in a collective while another one loads data, compiles, evaluates or saves. So
the limit begins at its ceiling, follows the measured durations of steps once there are enough of
them, and widens for phases that are long by nature: to the ceiling while such a phase was never
measured, and to a multiple of the longest one after that. A limit that is too short ends a healthy
job, so every doubt widens it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from elastic.tuning.timeouts import require_below, require_positive
from elastic.tuning.worker_intervals import COLLECTIVE_FLOOR_S, COLLECTIVE_TIMEOUT_S


class LongPhase(str, Enum):
    """What may keep one rank while the others wait, for much longer than a step."""

    COMPILATION = "compilation"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"
    USER_CODE = "user code"


class CollectiveLimit(NamedTuple):
    """The limit, and why it is that long."""

    limit_s: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class CollectiveLimitPolicy:
    """The numbers of the rule.

    Raises:
        ConfigError: the floor is not below the ceiling, or a number is not above zero.
    """

    floor_s: float = COLLECTIVE_FLOOR_S
    ceiling_s: float = COLLECTIVE_TIMEOUT_S
    # The first steps allocate, compile and fill caches: they say nothing of the others.
    skipped_steps: int = 3
    # So many more are to be measured before the limit is tightened.
    measured_steps: int = 20
    # Of the slowest step, and of the longest phase of a kind.
    step_factor: float = 20.0
    phase_factor: float = 3.0

    def __post_init__(self) -> None:
        for name in ("floor_s", "ceiling_s", "step_factor", "phase_factor"):
            require_positive(name, getattr(self, name))
        require_below("floor_s", self.floor_s, "ceiling_s", self.ceiling_s)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was measured in this world, of all ranks.

    ``step_times_s``: of all steps, the first ones included, in their order. ``phases_s``: the
    longest of each kind that has ended. ``expected``: kinds that the job may still enter, because
    the script has said so or because it has done so before.
    """

    step_times_s: Sequence[float]
    phases_s: Mapping[LongPhase, float] = field(default_factory=dict)
    expected: frozenset[LongPhase] = frozenset()


def collective_limit(
    measured: Measured, policy: CollectiveLimitPolicy | None = None
) -> CollectiveLimit:
    """The limit for the collectives from now on.

    >>> collective_limit(Measured(step_times_s=[0.5] * 10)).limit_s
    1800.0
    >>> collective_limit(Measured(step_times_s=[30.0] + [10.0] * 30)).limit_s
    200.0
    """
    policy = policy if policy is not None else CollectiveLimitPolicy()
    steps = [s for s in measured.step_times_s[policy.skipped_steps :] if math.isfinite(s)]
    if len(steps) < policy.measured_steps:
        return CollectiveLimit(
            policy.ceiling_s,
            f"{len(steps)} of {policy.measured_steps} steps are measured: the ceiling",
        )
    if unmeasured := sorted(phase.value for phase in measured.expected - measured.phases_s.keys()):
        return CollectiveLimit(
            policy.ceiling_s, f"no {unmeasured[0]} has ended yet, and one may come: the ceiling"
        )
    slowest_s = max(steps)
    candidates = [
        (policy.floor_s, "the floor"),
        (
            policy.step_factor * slowest_s,
            f"{policy.step_factor:g} times {slowest_s:.3g} s, the slowest step",
        ),
        *(
            (
                policy.phase_factor * longest_s + slowest_s,
                f"{policy.phase_factor:g} times {longest_s:.3g} s, the longest {phase.value}, and "
                "a step",
            )
            for phase, longest_s in measured.phases_s.items()
        ),
    ]
    limit_s, reason = max(candidates)
    if limit_s >= policy.ceiling_s:
        return CollectiveLimit(policy.ceiling_s, f"the ceiling: {reason} would be {limit_s:.3g} s")
    return CollectiveLimit(limit_s, reason)
