"""The duration of steps, and which steps are reported individually."""

from __future__ import annotations

import pytest
from kit.manual_clock import ManualClock

from elastic.train.current import CurrentStep
from elastic.train.progress import StepTimer
from elastic.train.state import JobState
from elastic.tuning.intervals import LINK_HEARTBEAT_S


@pytest.mark.parametrize(("step_time_s", "is_slow"), [(0.02, False), (LINK_HEARTBEAT_S, True)])
def test_steps_slower_than_heartbeats_are_reported_immediately(
    step_time_s: float, is_slow: bool
) -> None:
    clock = ManualClock()
    timer = StepTimer(clock)
    timer.committed(1)
    assert not timer.is_slow, "no duration is known"
    clock.advance(step_time_s)
    timer.committed(2)
    assert timer.is_slow is is_slow


def test_the_duration_is_that_of_one_step_of_an_accumulation() -> None:
    """The time left, and the step at which a planned switch takes place, are computed from it."""
    clock, job = ManualClock(), JobState(seed=0)
    timer = StepTimer(clock)
    for step in (8, 16, 24):
        timer.committed(step)
        clock.advance(4.0)
    assert timer.heartbeat(1, job, CurrentStep()).step_time_s == 0.5
    assert timer.is_slow, "a commit takes four seconds"
