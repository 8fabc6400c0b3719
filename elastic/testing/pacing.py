"""The speed of a training script under test: slow enough that the job does not end first.

A job has a fixed number of steps, so that its final weights are known. How long a test needs until
it has caused all of its faults is not known: a busy machine may take ten times as long as an idle
one. So steps are slow until the test creates a file, and they are slower in the second
half of the job, which an idle machine does not reach.
"""

from __future__ import annotations

import time
from pathlib import Path

LATE_STEP_S = 1.0
"""The least duration of a step in the second half of a job."""
LATE_FACTOR = 6
"""How many times longer it takes than one of the first half, at least."""
SLOW_STEP_S = 2.0
"""What a step takes at least while there is a file :data:`SLOW` beside ``hurry``: also on a busy
machine, an announcement is known everywhere two steps later."""
SLOW = "slow"


def pause_after_step(hurry: Path, step_s: float, done: float) -> None:
    """Sleep for what a step takes until the file ``hurry`` exists; a script calls it after a step.

    Args:
        hurry: a file that the test creates once it has nothing left to do to the job.
        step_s: what a step of the first half takes.
        done: how much of the job is done, from 0 to 1.
    """
    if hurry.exists():
        return
    least_s = SLOW_STEP_S if hurry.with_name(SLOW).exists() else 0.0
    late_s = 0.0 if done < 0.5 else max(LATE_FACTOR * step_s, LATE_STEP_S)
    time.sleep(max(step_s, least_s, late_s))
