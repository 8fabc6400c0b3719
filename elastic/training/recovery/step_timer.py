"""Measures the duration of steps, and reports it in heartbeats."""

from __future__ import annotations

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.link.protocol import IN_STEP, Heartbeat
from elastic.training.current_step import CurrentStep
from elastic.training.state.job_state import JobState
from elastic.tuning.worker_intervals import LINK_HEARTBEAT_S

_SMOOTHING = 0.1  # factor of exponential smoothing


class StepTimer:
    """Measures steps. One per process; written by the main thread, read by the link's thread."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._step_time_s = 0.0
        self._last: tuple[float, int] | None = None  # time of the last commit, and its steps
        self._steps = 1  # of the last commit

    def committed(self, step: int) -> None:
        """Record a commit after ``step`` steps of the job. It commits several if the script
        accumulates gradients over them."""
        now_s = self._clock.monotonic()
        if self._last is not None and step > self._last[1]:
            last_s, last_step = self._last
            self._steps = step - last_step
            took_s = (now_s - last_s) / self._steps
            before_s = self._step_time_s or took_s
            self._step_time_s = before_s + _SMOOTHING * (took_s - before_s)
        self._last = now_s, step

    @property
    def is_slow(self) -> bool:
        """Whether commits are at least as far apart as the link's heartbeats."""
        return self._step_time_s * self._steps >= LINK_HEARTBEAT_S

    def restart(self) -> None:
        """Exclude the time until the next commit, which is not a step's duration."""
        self._last = None

    def heartbeat(self, generation: int, job: JobState, current: CurrentStep) -> Heartbeat:
        """This worker's position in the world ``generation``."""
        return Heartbeat(
            generation=generation,
            step=job.progress.step,
            phase=IN_STEP if current.step is not None else "other",
            step_time_s=self._step_time_s,
        )
