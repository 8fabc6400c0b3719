"""Writes this rank's time account to the journal every few seconds.

It writes one event per window rather than per step, so a step costs only a few stores. The phases
come from :data:`elastic.hangs.phases.phases`; :mod:`elastic.telemetry.goodput` reads the events.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.events import RankTimes
from elastic.hangs.facts import Phase
from elastic.hangs.phases import phases
from elastic.telemetry.journal import EventSink
from elastic.tuning.worker_intervals import STEP_TIMES_S

# Activities that are never part of a step. Others are part of it once it is committed.
_OUTSIDE_STEPS = (Phase.DATA, Phase.CHECKPOINT, Phase.EVALUATION)


class PhaseTimes(Protocol):
    """The subset of the phase recorder that is used here."""

    def seconds(self) -> Sequence[float]: ...
    def at_commit(self) -> tuple[float, Sequence[float]]: ...


class StepAccount:
    """The time account. One per process, used by the main thread; inactive outside of a world.

    :meth:`committed` need not be called after each step: the recorder has the time of the last one.
    """

    def __init__(
        self, journal: EventSink, *, clock: Clock = SYSTEM_CLOCK, times: PhaseTimes = phases
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._times = times
        self._generation: int | None = None
        self._is_first = False
        self._step = self._began_step = 0
        self._began_s = 0.0
        self._began: Sequence[float] = ()

    def begin_world(self, generation: int, step: int) -> None:
        """Begin accounting in a world, after ``step`` steps."""
        phases.account()
        self._generation, self._step, self._is_first = generation, step, True
        self._begin_window(self._clock.monotonic(), self._times.seconds())

    def committed(self, step: int) -> None:
        """Record that ``step`` steps are committed."""
        if self._generation is None:
            return
        self._step = step
        if self._is_first or self._clock.monotonic() - self._began_s >= STEP_TIMES_S:
            self._report("first-step" if self._is_first else "due", *self._times.at_commit())
            self._is_first = False

    def end_world(self, ended: str) -> None:
        """End the world, or the process. ``ended``: "fault", "change" or "close"."""
        if self._generation is None:
            return
        self._report(ended, self._clock.monotonic(), self._times.seconds())
        self._generation = None

    def pause(self) -> None:
        """Begin a paused world, whose time counts as waiting for the next one."""
        self._generation = None

    def _begin_window(self, now_s: float, seconds: Sequence[float]) -> None:
        self._began_step = self._step
        self._began_s, self._began = now_s, seconds

    def _report(self, ended: str, now_s: float, seconds: Sequence[float]) -> None:
        assert self._generation is not None
        steps = self._step - self._began_step
        committed_s, committed = self._times.at_commit() if steps else (self._began_s, self._began)
        window = [b - a for a, b in zip(self._began, seconds, strict=True)]
        open_ = [b - a for a, b in zip(committed, seconds, strict=True)]
        duration_s = now_s - self._began_s
        open_s = (now_s - committed_s) - sum(open_[phase] for phase in _OUTSIDE_STEPS)
        outside_s = sum(window[phase] for phase in _OUTSIDE_STEPS)
        event = RankTimes(
            generation=self._generation,
            step=self._step,
            steps=steps,
            duration_s=round(duration_s, 6),
            productive_s=round(max(0.0, duration_s - outside_s - open_s), 6),
            data_s=round(window[Phase.DATA], 6),
            checkpoint_s=round(window[Phase.CHECKPOINT], 6),
            evaluation_s=round(window[Phase.EVALUATION], 6),
            open_s=round(max(0.0, open_s), 6),
            collective_s=round(window[Phase.COLLECTIVE] - open_[Phase.COLLECTIVE], 6),
            ended=ended,
        )
        self._journal.emit(event, level=logging.DEBUG)
        self._begin_window(now_s, seconds)
