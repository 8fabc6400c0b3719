"""The duration of steps, and which steps are reported individually."""

from __future__ import annotations

import pytest

from elastic.testing.doubles.manual_clock import ManualClock
from elastic.training.recovery.step_timer import StepTimer
from elastic.tuning.worker_intervals import LINK_HEARTBEAT_S


@pytest.mark.parametrize(("step_time_s", "is_slow"), [(0.02, False), (LINK_HEARTBEAT_S, True)])
def test_steps_slower_than_heartbeats_are_reported_immediately(
    step_time_s: float, is_slow: bool
) -> None:
    clock = ManualClock()
    timer = StepTimer(clock)
    timer.committed()
    assert not timer.is_slow, "no duration is known"
    clock.advance(step_time_s)
    timer.committed()
    assert timer.is_slow is is_slow
