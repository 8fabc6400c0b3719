"""Measures how much slower this machine is than an idle one, for time limits in tests.

A guarantee such as "workers end within 2 s" holds on a machine that is not overloaded. A fixed
limit is either too short for a busy machine or too long to detect a violation. So a test measures
the duration of a known task, and scales its limit accordingly.
"""

from __future__ import annotations

import subprocess
import sys

from elastic.errors import SYSTEM_CLOCK, Clock

# Start an interpreter and import torch, like every agent and worker. An idle core of 2024 takes
# 1.8 s with the files in the page cache.
_WORK = "import torch"
IDLE_S = 2.0


def is_within(took_s: float, limit_s: float) -> bool:
    """Whether a duration is within ``limit_s`` of an idle machine's time.

    The slowness takes seconds of CPU time to measure, and is only needed if the limit is exceeded.
    """
    return took_s < limit_s or took_s < limit_s * measure_slowness()


def measure_slowness(clock: Clock = SYSTEM_CLOCK) -> float:
    """The start time of a process as a multiple of that on an idle machine; at least 1."""
    began_s = clock.monotonic()
    subprocess.run([sys.executable, "-c", _WORK], check=True)
    return max(1.0, (clock.monotonic() - began_s) / IDLE_S)
