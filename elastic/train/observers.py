"""What observes steps: the line of progress, and profiles on request."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TextIO

import torch
from torch.profiler import ProfilerActivity, profile

from elastic.errors import SYSTEM_CLOCK, Clock, ConfigError
from elastic.groups.world import World
from elastic.telemetry.events import ProfileWritten
from elastic.telemetry.journal import EventSink
from elastic.telemetry.log import get_logger
from elastic.telemetry.runs import chosen_journal
from elastic.train.hooks import Hook, Left
from elastic.train.metrics import WorldMean

# Between two lines of progress in a file: an hour is 720 lines.
PROGRESS_LINE_S = 5.0
# Between two updates of the line on a terminal.
PROGRESS_STATUS_S = 0.5

# ----------------------------------------------------------------------------
# Traces a few steps with torch.profiler: one file per rank, started and stopped between steps.
#
# The script (``run.profile``) or a user (``elastic profile``, by the link to the agent) requests a
# trace. If a world breaks, the trace ends once the next world has begun: stopping waits for the
# device, on which collectives with lost peers may hang until then.

LONGEST_STEPS = 10_000  # a trace holds every operator of every step in memory


class Trace(Protocol):
    """The subset of ``torch.profiler.profile`` that is used here."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def export_chrome_trace(self, path: str) -> None: ...


@dataclass(frozen=True)
class ProfileRequest:
    """A trace of ``steps`` steps, from step ``first`` (None: from the next one)."""

    steps: int
    first: int | None = None
    ranks: tuple[int, ...] = ()  # empty: all


def request_of(steps: int | range, ranks: tuple[int, ...]) -> ProfileRequest:
    """Create a valid request. Raises ConfigError for invalid steps or ranks."""
    count = len(steps) if isinstance(steps, range) else steps
    is_plain = not isinstance(steps, range) or steps.step == 1
    if isinstance(count, bool) or not 1 <= count <= LONGEST_STEPS or not is_plain:
        raise ConfigError(
            f"run.profile(steps={steps!r}): steps must be 1 to {LONGEST_STEPS} consecutive steps",
            hint="run.profile(steps=10), or run.profile(steps=range(100, 110))",
        )
    if any(rank < 0 for rank in ranks):
        raise ConfigError(f"run.profile(ranks={ranks!r}): ranks are integers from 0")
    return ProfileRequest(count, steps.start if isinstance(steps, range) else None, ranks)


def traces_folder(env: Mapping[str, str] = os.environ) -> Path:
    """``profiles`` in the chosen journal folder, else in the working directory."""
    return Path(chosen_journal(env) or "") / "profiles"


def torch_trace() -> Trace:
    """A profiler of this thread's operators and, with a GPU, its kernels."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities)


class StepProfiler(Hook):
    """This rank's profiler. One per process; used by the main thread, except :meth:`request`."""

    def __init__(
        self,
        journal: EventSink,
        *,
        folder: Callable[[], Path] = traces_folder,
        begin: Callable[[], Trace] = torch_trace,
    ) -> None:
        self._journal = journal
        self._folder = folder
        self._begin = begin
        self._lock = threading.Lock()
        self._requested: ProfileRequest | None = None
        self._trace: Trace | None = None
        self._world: World | None = None
        self._began_in = 0  # generation
        self._first = self._last = self._step = 0
        self._is_interrupted = False

    def request(self, request: ProfileRequest) -> bool:
        """Request a trace, which starts at the boundary before its first step. Thread-safe.

        Returns False if another trace is already requested or running.
        """
        with self._lock:
            if self._requested is not None or self._trace is not None:
                return False
            self._requested = request
            return True

    # -- steps and worlds ----------------------------------------------------------------------

    def enter_world(self, world: World, step: int) -> None:
        """See :class:`Hook`."""
        if self._trace is not None:
            self._end()
        self._world, self._step = world, step
        self._begin_if_due(step)

    def commit(self, step: int) -> None:
        """See :class:`Hook`."""
        self._step = step
        if self._trace is not None and step >= self._last:
            self._end()
        if self._requested is not None:
            self._begin_if_due(step)

    def leave_world(self, reason: Left) -> None:
        """See :class:`Hook`."""
        self._is_interrupted = self._trace is not None
        if reason != "fault" and self._trace is not None:
            self._end()

    def close(self) -> None:
        """See :class:`Hook`."""
        if self._trace is not None and not self._is_interrupted:
            self._end()

    # -- the trace -----------------------------------------------------------------------------

    def _begin_if_due(self, step: int) -> None:
        request, world = self._requested, self._world
        if request is None or world is None:
            return
        first = step if request.first is None else request.first
        if step < first:
            return
        with self._lock:
            self._requested = None
        last = first + request.steps
        if step >= last or (request.ranks and world.rank not in request.ranks):
            return  # the job resumed after these steps, or other ranks were requested
        try:
            trace = self._begin()
            trace.start()
        except Exception as error:  # noqa: BLE001 - raised by torch's profiler: training continues
            get_logger().warning("could not profile steps %d to %d: %s", step, last, error)
            return
        self._trace, self._began_in, self._is_interrupted = trace, world.generation, False
        self._first, self._last = step, last

    def _end(self) -> None:
        trace, self._trace = self._trace, None
        assert trace is not None
        assert self._world is not None
        steps = max(0, self._step - self._first)
        name = f"g{self._began_in:04}-step{self._first:09}-rank{self._world.rank}.pt.trace.json"
        try:
            trace.stop()
            path = self._folder().absolute() / name
            path.parent.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(str(path))
        except Exception as error:  # noqa: BLE001 - raised by torch's profiler, or by the disk
            get_logger().warning("the profile %s was not written: %s", name, error)
            return
        event = ProfileWritten(
            path=str(path),
            first=self._first,
            steps=steps,
            asked=self._last - self._first,
        )
        is_main = self._world.rank == 0
        self._journal.emit(event, level=logging.INFO if is_main else logging.DEBUG)


# ----------------------------------------------------------------------------
# The progress line, printed by rank 0 every few seconds.
#
# On a terminal the line is updated in place; otherwise lines are logged. The rate covers the last
# few seconds in the current world, without its first step, so that neither a recovery nor a larger
# world distorts the remaining time.

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


class ProgressLine(Hook):
    """The progress line. One per process; only rank 0 prints.

    Args:
        newest: the last known values.
        steps_left: the number of steps until the end of training; None if unknown.
        out: the stream that may be a terminal.
    """

    SEES_EACH_STEP = False

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

    def enter_world(self, world: World, step: int) -> None:
        """See :class:`Hook`."""
        self._world = world if world.rank == 0 and self._is_on else None
        self._is_first = True
        self._begin_window(self._clock.monotonic(), step)

    def commit(self, step: int) -> None:
        """See :class:`Hook`."""
        if self._world is None:
            return
        now_s = self._clock.monotonic()
        is_due = now_s - self._printed_s >= self._every_s
        if is_due:
            self._print(self._world, now_s, step)
        if is_due or self._is_first:
            self._is_first = False
            self._begin_window(now_s, step)

    def leave_world(self, reason: Left) -> None:
        """See :class:`Hook`."""
        self._world = None
        if self._is_status_shown:
            self._is_status_shown = False
            self._out.write(f"\r{_CLEAR_TO_END}")
            self._out.flush()

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
