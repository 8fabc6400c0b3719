"""How fast a training script goes under test: never so fast that the job ends before its test.

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


def pause_after_step(hurry: Path, step_s: float, done: float) -> None:
    """Sleep for what a step takes until the file ``hurry`` exists; a script calls it after a step.

    Args:
        hurry: a file that the test creates once it has nothing left to do to the job.
        step_s: what a step of the first half takes.
        done: how much of the job is done, from 0 to 1.
    """
    if not hurry.exists():
        time.sleep(step_s if done < 0.5 else max(step_s, LATE_STEP_S))
