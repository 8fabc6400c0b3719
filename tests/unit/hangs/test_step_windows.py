"""The step measurements of a worker, in windows, and their overhead."""

from __future__ import annotations

import gc
import pdb
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from elastic.hangs.page import (
    FIRST_STEPS,
    MAX_STEPS,
    MIN_STEPS,
    Phase,
    PhaseRecorder,
    StepDurations,
    StepPart,
    StepWindows,
)

STEPS = 3000
MAX_PER_STEP_S = 5e-6
CALLS_S = 5e-6  # a hundred Python function calls, on a 2024 core
S = 1_000_000_000  # ns
SHORTEST_S = 1e-9  # of a window: as soon as it has its steps


def parts(data_s: float = 0.0, compute_s: float = 0.0, script_s: float = 0.0) -> list[float]:
    return [data_s, compute_s, 0.0, 0.0, script_s]


def test_nothing_is_measured_before_measure_is_called() -> None:
    windows = StepWindows()
    windows.restart(1, 0)
    for step in range(2 * MIN_STEPS):
        windows.add(parts(1.0), 8, step * S)
    assert windows.take() is None


def test_a_window_has_a_minimum_duration_and_number_of_steps() -> None:
    windows = StepWindows()
    windows.measure(4.0)
    windows.restart(7, 0)
    for step in range(1, MIN_STEPS):
        windows.add(parts(0.25, 0.5), 8, step * S)
    assert windows.take() is None, "long enough, and too few steps"
    windows.add(parts(0.25, 0.5), 8, MIN_STEPS * S)
    times = windows.take()
    assert times == StepDurations(
        generation=7,
        window=1,
        steps=MIN_STEPS - 1,
        samples=8 * (MIN_STEPS - 1),
        data_s=0.25,
        compute_s=0.5,
        collective_s=0.0,
        checkpoint_s=0.0,
        script_s=0.0,
    )
    assert windows.take() is None, "once"
    for step in range(MIN_STEPS):
        windows.add(parts(0.25, 0.5), 8, int((MIN_STEPS + step / 10) * S))
    assert windows.take() is None, "steps enough, and too short"
    windows.add(parts(0.25, 0.5), 8, (MIN_STEPS + 4) * S)
    times = windows.take()
    assert times is not None
    assert times.window == 2


def test_the_slowest_tenth_of_steps_is_excluded() -> None:
    """A garbage collection, a compilation, a stalled machine."""
    windows = StepWindows()
    windows.measure(1.0)
    windows.restart(1, 0)
    for step in range(20):
        pause_s = 60.0 if step in (3, 11) else 0.0
        windows.add(parts(0.125, 0.25 + pause_s), 8, 2 * S if step == 19 else 0)
    times = windows.take()
    assert times is not None
    assert (times.steps, times.data_s, times.compute_s) == (18, 0.125, 0.25)
    assert times.own_s == 0.375


def test_a_new_world_begins_a_new_window() -> None:
    windows = StepWindows()
    windows.measure(1.0)
    windows.restart(1, 0)
    for _ in range(MIN_STEPS):
        windows.add(parts(9.0), 8, 0)
    windows.restart(2, 0)
    for _ in range(MIN_STEPS):
        windows.add(parts(1.0), 8, 2 * S)
    times = windows.take()
    assert times is not None
    assert (times.generation, times.data_s) == (2, 1.0)


def test_a_window_keeps_a_limited_number_of_steps() -> None:
    windows = StepWindows()
    windows.measure(1.0)
    windows.restart(1, 0)
    for _ in range(3 * MAX_STEPS):
        windows.add(parts(1.0), 8, 0)
    windows.add(parts(1.0), 8, 2 * S)
    times = windows.take()
    assert times is not None
    assert times.steps == MAX_STEPS - MAX_STEPS // 10


@pytest.fixture
def windows() -> StepWindows:
    return StepWindows()


class Clock:
    """The clock of the recorder, which advances slightly with each reading."""

    def __init__(self) -> None:
        self.now_ns = time.monotonic_ns()

    def __call__(self) -> int:
        self.now_ns += 1000
        return self.now_ns

    def spend(self, seconds: float) -> None:
        self.now_ns += int(seconds * S)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("elastic.hangs.page.monotonic_ns", clock)
    return clock


@pytest.fixture
def recorder(
    windows: StepWindows, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PhaseRecorder]:
    monkeypatch.setattr(pdb.Pdb, "interaction", pdb.Pdb.interaction)  # restored afterwards
    recorder = PhaseRecorder(windows)
    recorder.start()
    recorder.enter_generation(3)
    recorder.begin_world(0)
    yield recorder
    gc.callbacks.remove(recorder._on_garbage)


def train(
    recorder: PhaseRecorder, clock: Clock, steps: int, *, samples: int = 8, data_s: float = 1.0
) -> None:
    """Run steps with a known time in every phase, on a rank that also evaluates."""

    def spend(phase: Phase, seconds: float) -> None:
        recorder.enter(phase)
        clock.spend(seconds)

    for number in range(steps):
        spend(Phase.DATA, data_s)
        recorder.begin_step(number, samples)
        spend(Phase.COMPUTE, 2.0)
        before = recorder.begin_wait(1, 1)
        clock.spend(4.0)
        recorder.end_wait(before)
        spend(Phase.SCRIPT, 8.0)
        spend(Phase.OPTIMIZER, 16.0)
        recorder.enter(Phase.SCRIPT)
        before = recorder.enter_batch()  # of a loader other than the training loader
        clock.spend(32.0)
        recorder.enter(before)
        spend(Phase.EVALUATION, 64.0)
        spend(Phase.CHECKPOINT, 128.0)
        recorder.committed(number + 1)


def taken(windows: StepWindows) -> StepDurations:
    times = windows.take()
    assert times is not None
    return times


def of_parts(times: StepDurations) -> dict[StepPart, float]:
    """Rounded to seconds, because the test itself takes less."""
    return {
        StepPart.DATA: round(times.data_s),
        StepPart.COMPUTE: round(times.compute_s),
        StepPart.COLLECTIVE: round(times.collective_s),
        StepPart.CHECKPOINT: round(times.checkpoint_s),
        StepPart.SCRIPT: round(times.script_s),
    }


def test_phases_map_to_the_parts_of_a_step(
    recorder: PhaseRecorder, clock: Clock, windows: StepWindows
) -> None:
    windows.measure(SHORTEST_S)
    train(recorder, clock, FIRST_STEPS)
    train(recorder, clock, MIN_STEPS + 1)
    times = taken(windows)
    assert (times.generation, times.samples) == (3, 8 * times.steps)
    assert of_parts(times) == {
        StepPart.DATA: 1,
        StepPart.COMPUTE: 2 + 16,
        StepPart.COLLECTIVE: 4,
        StepPart.CHECKPOINT: 128,
        StepPart.SCRIPT: 8 + 32 + 64,
    }


def test_the_first_steps_of_a_world_are_not_counted(
    recorder: PhaseRecorder, clock: Clock, windows: StepWindows
) -> None:
    windows.measure(SHORTEST_S)
    train(recorder, clock, FIRST_STEPS, data_s=1000.0)
    train(recorder, clock, MIN_STEPS + 1)
    assert taken(windows).data_s < 2
    recorder.enter_generation(4)
    recorder.begin_world(1)
    train(recorder, clock, FIRST_STEPS, data_s=1000.0)
    train(recorder, clock, MIN_STEPS + 1)
    times = taken(windows)
    assert times.generation == 4
    assert times.data_s < 2


def test_waits_for_the_scripts_own_loader_count_as_data_time(
    recorder: PhaseRecorder, clock: Clock, windows: StepWindows
) -> None:
    windows.measure(SHORTEST_S)
    train(recorder, clock, FIRST_STEPS + MIN_STEPS + 1, samples=0)
    times = taken(windows)
    assert times.samples == 0
    assert of_parts(times)[StepPart.DATA] == 1 + 32


def test_a_loader_in_another_thread_is_not_counted(
    recorder: PhaseRecorder, clock: Clock, windows: StepWindows
) -> None:
    windows.measure(SHORTEST_S)
    recorder.begin_step(0, 8)

    def other() -> None:
        recorder.enter(recorder.enter_batch())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    train(recorder, clock, FIRST_STEPS + MIN_STEPS + 1)
    assert of_parts(taken(windows))[StepPart.DATA] == 1


def test_measuring_a_step_costs_microseconds(windows: StepWindows) -> None:
    """The overhead of a step: its phases, its end, and its portion of the end of a window."""
    windows.measure(10.0)
    parts_s = parts(0.01, 0.02)

    def step(number: int) -> None:
        for part in (0, 1, 2, 1, 4, 1, 4, 3):
            parts_s[part] += 0.001
        windows.add(parts_s, 8, number * S // 100)
        for part in StepPart:
            parts_s[part] = 0.0

    slowness = max(1.0, min(_timed(_call_100_times) for _ in range(20)) / CALLS_S)
    best_s = min(_timed(step) for _ in range(10))
    assert windows.take() is not None, "windows have ended"
    assert best_s < MAX_PER_STEP_S * slowness, f"{best_s * 1e6:.1f} us"


def _timed(step: Callable[[int], None]) -> float:
    """CPU seconds, because the machine is shared."""
    began_s = time.thread_time()
    for number in range(STEPS):
        step(number)
    return (time.thread_time() - began_s) / STEPS


def _call_100_times(number: int) -> None:
    for _ in range(100):
        _nothing(number)


def _nothing(number: int) -> None:
    pass
