"""The choice of the interval between two saves to the nodes' memory: a pure function.

A death costs the steps since the last save, so the interval is the shortest one at which saves take
no more than a given fraction of training time. If a save costs C, that is C / fraction.
Young's optimum is sqrt(2 C M) for a mean time M between failures (J. W. Young, "A first order
approximation to the optimum checkpoint interval", 1974); both are equal where M is
C / (2 fraction²). With 1 %, a save of 2 s and a failure every three hours, both are 200 s. Cheaper
saves are more frequent than at the optimum, which depends on the unknown M, and still cost 1 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from elastic.tuning.worker_intervals import MEMORY_LONGEST_S

UNMEASURED_STEPS = 10  # the interval before anything is measured
LONGEST_STEPS = 1000
_SLACK = 1.25  # an interval is kept while it is affordable and at most this factor too long


@dataclass(frozen=True, kw_only=True)
class MemoryCosts:
    """The costs of saves to memory: measured by one rank, or combined from all ranks."""

    every_steps: int | None = None  # the interval in use; None: unknown to this rank
    wait_s: float | None = None  # time that training waits for a save
    write_s: float | None = None  # time to write a share while training continues
    step_s: float | None = None  # time of a step without these saves


@dataclass(frozen=True)
class ChosenInterval:
    """The interval to use from now on."""

    every_steps: int
    reason: str  # a sentence without its full stop


def combine(ranks: Sequence[MemoryCosts]) -> MemoryCosts:
    """Combine the costs of a world's ranks, in order: all of them wait for the slowest."""
    return MemoryCosts(
        every_steps=next((r.every_steps for r in ranks if r.every_steps is not None), None),
        wait_s=max((r.wait_s for r in ranks if r.wait_s is not None), default=None),
        write_s=max((r.write_s for r in ranks if r.write_s is not None), default=None),
        step_s=min((r.step_s for r in ranks if r.step_s is not None), default=None),
    )


def choose(costs: MemoryCosts, overhead: float) -> ChosenInterval:
    """The shortest interval at which saves take at most ``overhead`` of training time.

    At least 1 step, and longer than the write of a share; at most ``LONGEST_STEPS`` and
    ``MEMORY_LONGEST_S``, which bound the lost work regardless of the cost of a save.

    >>> choose(MemoryCosts(every_steps=10, wait_s=0.012, step_s=0.180), 0.01)
    ChosenInterval(every_steps=7, reason='a save costs 12 ms, a step 180 ms')
    """
    current = costs.every_steps or UNMEASURED_STEPS
    if costs.wait_s is None or costs.step_s is None:
        return ChosenInterval(current, "not measured yet")
    step_s = max(costs.step_s, 1e-6)  # the resolution of measurements
    reason = f"a save costs {_shown(costs.wait_s)}, a step {_shown(costs.step_s)}"
    shortest = max(1, math.ceil(costs.wait_s / step_s / overhead))
    if costs.write_s is not None and (write_steps := math.ceil(costs.write_s / step_s)) >= shortest:
        shortest = write_steps + 1
        reason += f", and its share is written in {_shown(costs.write_s)}"
    bearable = math.floor(MEMORY_LONGEST_S / step_s)
    longest = max(1, min(LONGEST_STEPS, bearable))
    if shortest > longest:
        taken = costs.wait_s / (costs.wait_s + longest * step_s)
        return ChosenInterval(
            longest,
            f"{reason}; saves take {taken:.0%} of the time: a longer interval would lose more",
        )
    if shortest <= current <= min(longest, shortest * _SLACK):
        return ChosenInterval(current, reason)
    return ChosenInterval(shortest, reason)


def _shown(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
