"""Where this rank's time goes, summed up in the journal every few seconds.

One event per window rather than one per step: a step costs a few list operations. The phases come
from :data:`elastic.hangs.phases.phases`; :mod:`elastic.telemetry.goodput` reads the events.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.events import StepTimes
from elastic.hangs.facts import Phase
from elastic.hangs.phases import phases
from elastic.telemetry.journal import EventSink
from elastic.tuning.worker_intervals import STEP_TIMES_S

# What is no part of a step wherever it happens. Everything else is, once the step is committed.
_BESIDE_STEPS = (Phase.DATA, Phase.CHECKPOINT, Phase.EVALUATION)


class StepAccount:
    """One per process. The main thread calls it; it does nothing outside of a world."""

    def __init__(
        self,
        journal: EventSink,
        *,
        clock: Clock = SYSTEM_CLOCK,
        seconds: Callable[[], Sequence[float]] = phases.seconds,
    ) -> None:
        self._journal = journal
        self._clock = clock
        self._seconds = seconds
        self._generation: int | None = None
        self._is_first = False
        self._step = self._steps = 0
        self._began_s = self._committed_s = 0.0
        self._began: Sequence[float] = ()
        self._committed: Sequence[float] = ()

    def begin_world(self, generation: int, step: int) -> None:
        """Training goes on in a world, with ``step`` steps behind it."""
        phases.account()
        self._generation, self._step, self._is_first = generation, step, True
        self._begin_window(self._clock.monotonic(), self._seconds())

    def committed(self, step: int) -> None:
        """That many steps have taken effect."""
        if self._generation is None:
            return
        self._step, self._steps = step, self._steps + 1
        now_s = self._clock.monotonic()
        self._committed_s, self._committed = now_s, self._seconds()
        if self._is_first or now_s - self._began_s >= STEP_TIMES_S:
            self._report("first-step" if self._is_first else "due", now_s, self._committed)
            self._is_first = False

    def end_world(self, ended: str) -> None:
        """The world is over, or the process ends. ``ended``: "fault", "change" or "close"."""
        if self._generation is None:
            return
        self._report(ended, self._clock.monotonic(), self._seconds())
        self._generation = None

    def pause(self) -> None:
        """Nothing is trained in this world: whoever waits for the next one accounts for it."""
        self._generation = None

    def _begin_window(self, now_s: float, seconds: Sequence[float]) -> None:
        self._steps = 0
        self._began_s = self._committed_s = now_s
        self._began = self._committed = seconds

    def _report(self, ended: str, now_s: float, seconds: Sequence[float]) -> None:
        assert self._generation is not None
        whole = [b - a for a, b in zip(self._began, seconds, strict=True)]
        open_ = [b - a for a, b in zip(self._committed, seconds, strict=True)]
        duration_s = now_s - self._began_s
        open_s = (now_s - self._committed_s) - sum(open_[phase] for phase in _BESIDE_STEPS)
        beside_s = sum(whole[phase] for phase in _BESIDE_STEPS)
        event = StepTimes(
            generation=self._generation,
            step=self._step,
            steps=self._steps,
            duration_s=round(duration_s, 6),
            productive_s=round(max(0.0, duration_s - beside_s - open_s), 6),
            data_s=round(whole[Phase.DATA], 6),
            checkpoint_s=round(whole[Phase.CHECKPOINT], 6),
            evaluation_s=round(whole[Phase.EVALUATION], 6),
            open_s=round(max(0.0, open_s), 6),
            collective_s=round(whole[Phase.COLLECTIVE] - open_[Phase.COLLECTIVE], 6),
            ended=ended,
        )
        self._journal.emit(event, level=logging.DEBUG)
        self._begin_window(now_s, seconds)
