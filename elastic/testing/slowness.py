"""Measures how much slower this machine is than an idle one, for time limits in tests.

A promise such as "workers end within 2 s" holds on a machine that has time for them. A fixed limit
is either too short for a busy machine or too long to notice that the promise is broken. So a test
measures what a known piece of work takes here and now, and multiplies its limit by that.
"""

from __future__ import annotations

import subprocess
import sys

from elastic.clock import SYSTEM_CLOCK, Clock

# Starting an interpreter and importing torch, as every agent and worker does. An idle core of 2024
# takes 1.8 s, once the files are in memory.
_WORK = "import torch"
IDLE_S = 2.0


def is_within(took_s: float, limit_s: float) -> bool:
    """Whether a duration is within ``limit_s`` of an idle machine's time.

    How slow this machine is takes seconds of CPU time to measure, and only matters where the limit
    of an idle one does not hold.
    """
    return took_s < limit_s or took_s < limit_s * measure_slowness()


def measure_slowness(clock: Clock = SYSTEM_CLOCK) -> float:
    """How many times longer than on an idle machine a process takes to start; at least 1."""
    began_s = clock.monotonic()
    subprocess.run([sys.executable, "-c", _WORK], check=True)
    return max(1.0, (clock.monotonic() - began_s) / IDLE_S)
