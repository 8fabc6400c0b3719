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
        self._last_commit_s: float | None = None

    def committed(self) -> None:
        """Record a committed step."""
        now_s = self._clock.monotonic()
        if self._last_commit_s is not None:
            took_s = now_s - self._last_commit_s
            before_s = self._step_time_s or took_s
            self._step_time_s = before_s + _SMOOTHING * (took_s - before_s)
        self._last_commit_s = now_s

    @property
    def is_slow(self) -> bool:
        """Whether steps take at least as long as the interval of the link's heartbeats."""
        return self._step_time_s >= LINK_HEARTBEAT_S

    def restart(self) -> None:
        """Exclude the time until the next commit, which is not a step's duration."""
        self._last_commit_s = None

    def heartbeat(self, generation: int, job: JobState, current: CurrentStep) -> Heartbeat:
        """This worker's position in the world ``generation``."""
        return Heartbeat(
            generation=generation,
            step=job.progress.step,
            phase=IN_STEP if current.step is not None else "other",
            step_time_s=self._step_time_s,
        )
