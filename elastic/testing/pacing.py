"""The speed of a training script under test: slow enough that the job does not end first.

A job has a fixed number of steps, so that its final weights are known. The time until a test has
injected all its faults is not: a busy machine may take ten times as long as an idle one. So steps
are slow until the test creates a file, and even slower in the second half of the job, which tests
on an idle machine do not reach.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

LATE_STEP_S = 1.0
"""The minimum duration of a step in the second half of a job."""
LATE_FACTOR = 6
"""The minimum ratio of the duration of a step to that of a step in the first half."""
SLOW_STEP_S = 2.0
"""The minimum duration of a step while a file :data:`SLOW` exists next to ``hurry``: even on a busy
machine, all ranks receive an announcement within two steps."""
SLOW_NODE_STEP_S = 3.0
"""The same while a file ``slow-NODE`` exists, on that node only."""
SLOW = "slow"


def pause_after_step(hurry: Path, step_s: float, done: float) -> None:
    """Sleep for the duration of a step until the file ``hurry`` exists; scripts call it after each.

    Args:
        hurry: a file that the test creates once it has injected all faults.
        step_s: the duration of a step in the first half.
        done: the completed fraction of the job, 0 to 1.
    """
    if hurry.exists():
        return
    least_s = SLOW_STEP_S if hurry.with_name(SLOW).exists() else 0.0
    if hurry.with_name(f"{SLOW}-{os.environ.get('ELASTIC_NODE_NAME')}").exists():
        least_s = SLOW_NODE_STEP_S
    late_s = 0.0 if done < 0.5 else max(LATE_FACTOR * step_s, LATE_STEP_S)
    time.sleep(max(step_s, least_s, late_s))
