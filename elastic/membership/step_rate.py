"""The job's step rate, and the switch step of a planned world.

docs/explanation/protocol.md, section 6, "Planned change".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from elastic.tuning.agent_intervals import ANNOUNCEMENT_S, EXTRAPOLATE_S


@dataclass(frozen=True)
class StepRate:
    """The last report of one node's workers."""

    generation: int  # the world in which they step
    step: int  # steps committed, which is also the number of the current step
    step_time_s: float  # a recent step's duration; 0: not known
    at_s: float  # when it was reported, on the monotonic clock of this agent


def switch_step(step_rate: StepRate, now: float) -> int:
    """The first step of a planned world.

    Every rank contributes to a collective of the previous step, so all of them must have received
    the plan by then. Ranks differ by at most one step: two ahead is the earliest possible. Too
    early costs one repeated step, too late only makes the joining nodes wait.
    """
    if step_rate.step_time_s <= 0:
        return step_rate.step + 2
    since_s = min(max(0.0, now - step_rate.at_s), EXTRAPOLATE_S)
    ahead = math.ceil(ANNOUNCEMENT_S / step_rate.step_time_s)
    return step_rate.step + int(since_s / step_rate.step_time_s) + max(2, ahead)
