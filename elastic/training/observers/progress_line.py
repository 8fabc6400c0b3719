"""The progress line, printed by rank 0 every few seconds.

On a terminal the line is updated in place; otherwise lines are logged. The rate covers the last few
seconds in the current world, without its first step, so that neither a recovery nor a larger world
distorts the remaining time.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, TextIO

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.errors import ConfigError
from elastic.telemetry.log import get_logger
from elastic.training.observers.values import WorldMean
from elastic.tuning.worker_intervals import PROGRESS_LINE_S, PROGRESS_STATUS_S
from elastic.world.world import World

_MAX_VALUES = 6  # values per line
_CLEAR_TO_END = "\x1b[K"


@dataclass(frozen=True, kw_only=True)
class TrainingProgress:
    """The content of a progress line."""

    step: int  # committed steps
    steps_left: int | None  # None: unknown
    step_time_s: float
    size: int  # of the world
    generation: int
    values: Mapping[str, float] = field(default_factory=dict)


def progress_text(progress: TrainingProgress) -> str:
    """Format one progress line.

    >>> progress_text(TrainingProgress(step=120, steps_left=880, step_time_s=0.05, size=4,
    ...     generation=3, values={"loss": 0.43218}))
    'step 120/1000, loss 0.4322 (rank 0), 20 steps/s, 44 s left, 4 workers in generation 3'
    """
    left = progress.steps_left
    parts = [f"step {progress.step}" + (f"/{progress.step + left}" if left is not None else "")]
    parts += _values(progress.values)
    if progress.step_time_s > 0:
        parts.append(_rate(progress.step_time_s))
        if left is not None:
            parts.append(f"{_duration(left * progress.step_time_s)} left")
    workers = "1 worker" if progress.size == 1 else f"{progress.size} workers"
    return ", ".join([*parts, f"{workers} in generation {progress.generation}"])


def _values(values: Mapping[str, float]) -> list[str]:
    """Means over the world first; then this rank's values, marked as such."""
    means = [f"{n} {v:.4g}" for n, v in values.items() if isinstance(v, WorldMean)]
    own = [f"{n} {v:.4g}" for n, v in values.items() if not isinstance(v, WorldMean)]
    shown = (means + own)[:_MAX_VALUES]
    if len(shown) > len(means):
        shown[-1] += " (rank 0)"
    return shown


def _rate(step_time_s: float) -> str:
    return f"{1 / step_time_s:.3g} steps/s" if step_time_s < 1 else f"{step_time_s:.3g} s/step"


def _duration(seconds: float) -> str:
    total_s = round(seconds)
    if total_s < 60:
        return f"{total_s} s"
    if total_s < 3600:
        return f"{total_s // 60} min {total_s % 60:02} s"
    if total_s < 48 * 3600:
        return f"{total_s // 3600} h {total_s % 3600 // 60:02} min"
    return f"{total_s // 86400} d {total_s % 86400 // 3600} h"


def is_wanted(env: Mapping[str, str] = os.environ) -> bool:
    """Whether ``ELASTIC_PROGRESS`` is on. Raises ConfigError if it is neither "on" nor "off"."""
    value = env.get("ELASTIC_PROGRESS", "on")
    if value not in ("on", "off"):
        raise ConfigError(f"ELASTIC_PROGRESS={value}", hint="set it to on (the default) or off")
    return value == "on"


class ProgressLine:
    """The progress line. One per process; only rank 0 prints.

    Args:
        newest: the last known values.
        steps_left: the number of steps until the end of training; None if unknown.
        out: the stream that may be a terminal.
    """

    SEES_EACH_STEP: ClassVar = False

    def __init__(
        self,
        newest: Callable[[], Mapping[str, float]],
        steps_left: Callable[[], int | None],
        *,
        is_on: bool,
        out: TextIO | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._newest = newest
        self._steps_left = steps_left
        self._out = sys.stderr if out is None else out
        self._clock = clock
        self._is_on = is_on
        self._is_live = is_on and self._out.isatty()
        self._every_s = PROGRESS_STATUS_S if self._is_live else PROGRESS_LINE_S
        self._world: World | None = None  # the world in which this is rank 0
        self._step = 0
        self._printed_s = 0.0
        self._printed_step = 0
        self._is_first = False  # the next step is the first of this world
        self._is_status_shown = False

    def begin_world(self, world: World, step: int) -> None:
        """See :class:`StepObserver`."""
        self._world = world if world.rank == 0 and self._is_on else None
        self._is_first = True
        self._begin_window(self._clock.monotonic(), step)

    def committed(self, step: int) -> None:
        """See :class:`StepObserver`."""
        if self._world is None:
            return
        now_s = self._clock.monotonic()
        is_due = now_s - self._printed_s >= self._every_s
        if is_due:
            self._print(self._world, now_s, step)
        if is_due or self._is_first:
            self._is_first = False
            self._begin_window(now_s, step)

    def end_world(self, ended: str) -> None:
        """See :class:`StepObserver`."""
        self._world = None
        if self._is_status_shown:
            self._is_status_shown = False
            self._out.write(f"\r{_CLEAR_TO_END}")
            self._out.flush()

    def pause(self) -> None:
        """See :class:`StepObserver`."""
        self.end_world("change")

    def close(self) -> None:
        """See :class:`StepObserver`."""

    def _begin_window(self, now_s: float, step: int) -> None:
        self._printed_s, self._printed_step = now_s, step

    def _print(self, world: World, now_s: float, step: int) -> None:
        steps = 0 if self._is_first else step - self._printed_step
        text = progress_text(
            TrainingProgress(
                step=step,
                steps_left=self._steps_left(),
                step_time_s=(now_s - self._printed_s) / steps if steps > 0 else 0.0,
                size=world.size,
                generation=world.generation,
                values=self._newest(),
            )
        )
        if not self._is_live:
            get_logger().info("%s", text)
            return
        # The cursor returns to the start of the line, so that output of other processes replaces
        # it.
        self._out.write(f"\r{text}{_CLEAR_TO_END}\r")
        self._out.flush()
        self._is_status_shown = True
