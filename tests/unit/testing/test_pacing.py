"""Scripts under test train until their test has finished, and time limits are scaled to the speed
of the machine."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from kit.manual_clock import ManualClock

from elastic.testing import slowness
from elastic.testing.pacing import LATE_FACTOR, LATE_STEP_S, pause_after_step


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    durations: list[float] = []
    monkeypatch.setattr(time, "sleep", durations.append)
    return durations


def test_steps_are_slower_in_the_second_half(tmp_path: Path, slept: list[float]) -> None:
    for done in (0.0, 0.49, 0.5, 0.99):
        pause_after_step(tmp_path / "hurry", 0.1, done)
    pause_after_step(tmp_path / "hurry", LATE_STEP_S, 0.9)
    assert slept == [0.1, 0.1, LATE_STEP_S, LATE_STEP_S, LATE_FACTOR * LATE_STEP_S]


def test_steps_do_not_wait_once_the_test_hurries_them(tmp_path: Path, slept: list[float]) -> None:
    (tmp_path / "hurry").touch()
    for done in (0.0, 0.9):
        pause_after_step(tmp_path / "hurry", 0.1, done)
    assert slept == []


@pytest.mark.parametrize(("work_s", "factor"), [(0.1, 1.0), (6 * slowness.IDLE_S, 6.0)])
def test_a_limit_scales_with_the_duration_of_reference_work(
    monkeypatch: pytest.MonkeyPatch, work_s: float, factor: float
) -> None:
    clock, commands = ManualClock(), []

    def work(command: list[str], *, check: bool) -> None:
        commands.append(command)
        clock.advance(work_s)

    monkeypatch.setattr(subprocess, "run", work)
    assert slowness.measure_slowness(clock) == pytest.approx(factor)
    assert commands == [[sys.executable, "-c", "import torch"]]
