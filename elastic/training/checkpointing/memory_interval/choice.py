"""The choice of the interval between two saves to the nodes' memory: a pure function.

A death costs the steps since the last save, so the interval is the shortest one at which saves take
no more than a given fraction of training time. With saves that cost C, that is C / fraction.
Young's optimum is sqrt(2 C M) for a mean time M between failures (J. W. Young, "A first order
approximation to the optimum checkpoint interval", 1974); both are equal where M is
C / (2 fraction²). With 1 %, a save of 2 s and a failure every three hours, both are 200 s. Cheaper
saves are more frequent than the optimum, for which M would have to be known, and still cost 1 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from elastic.tuning.worker_intervals import MEMORY_LONGEST_S

UNMEASURED_STEPS = 10  # the interval before anything is measured
LONGEST_STEPS = 1000
_SLACK = 1.25  # an interval stays in use while it is affordable and at most this much too long


@dataclass(frozen=True, kw_only=True)
class MemoryCosts:
    """What saves to memory cost, as one rank has measured it, or as all ranks have together."""

    every_steps: int | None = None  # the interval in use; None: this rank knows of none
    wait_s: float | None = None  # training waits for a save
    write_s: float | None = None  # a share is written while training continues
    step_s: float | None = None  # a step takes, without these saves


@dataclass(frozen=True)
class ChosenInterval:
    """The interval to use from now on."""

    every_steps: int
    reason: str  # a sentence without its full stop


def combine(ranks: Sequence[MemoryCosts]) -> MemoryCosts:
    """The costs of a world, from those of its ranks in order: all of them wait for the slowest."""
    return MemoryCosts(
        every_steps=next((r.every_steps for r in ranks if r.every_steps is not None), None),
        wait_s=max((r.wait_s for r in ranks if r.wait_s is not None), default=None),
        write_s=max((r.write_s for r in ranks if r.write_s is not None), default=None),
        step_s=min((r.step_s for r in ranks if r.step_s is not None), default=None),
    )


def choose(costs: MemoryCosts, overhead: float) -> ChosenInterval:
    """The shortest interval at which saves take at most ``overhead`` of training time.

    At least 1 step, and longer than a share takes to be written; at most ``LONGEST_STEPS``,
    and the steps of ``MEMORY_LONGEST_S``: these bound the work that is lost, whatever a save costs.

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
            longest, f"{reason}; a longer interval would lose more: {taken:.0%} of the time"
        )
    if shortest <= current <= min(longest, shortest * _SLACK):
        return ChosenInterval(current, reason)
    return ChosenInterval(shortest, reason)


def _shown(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
