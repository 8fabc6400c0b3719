"""Measures the duration of steps, and reports it in the heartbeat."""

from __future__ import annotations

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.link.protocol import IN_STEP, Heartbeat
from elastic.training.current_step import CurrentStep
from elastic.training.state.job_state import JobState
from elastic.tuning.worker_intervals import LINK_HEARTBEAT_S

_SMOOTHING = 0.1  # exponential


class StepTimer:
    """The step timer. One per process; written by the main thread, read by the link's thread."""

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
        """Whether heartbeats after each step are no more frequent than those of the link's
        thread."""
        return self._step_time_s >= LINK_HEARTBEAT_S

    def restart(self) -> None:
        """Exclude the time until the next commit: it is not that of a step."""
        self._last_commit_s = None

    def heartbeat(self, generation: int, job: JobState, current: CurrentStep) -> Heartbeat:
        """The progress of this worker in the world of ``generation``."""
        return Heartbeat(
            generation=generation,
            step=job.progress.step,
            phase=IN_STEP if current.step is not None else "other",
            step_time_s=self._step_time_s,
        )
