"""Traces a few steps with torch.profiler: one file per rank, started and stopped between steps.

The script (``run.profile``) or a user (``elastic profile``, by the link to the agent) requests a
trace. If a world breaks, the trace ends once the next world has begun: stopping waits for the
device, on which collectives with lost peers may hang until then.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import torch
from torch.profiler import ProfilerActivity, profile

from elastic.errors import ConfigError
from elastic.events import ProfileWritten
from elastic.telemetry.journal import EventSink
from elastic.telemetry.log import get_logger
from elastic.world.world import World

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
    """``ELASTIC_PROFILES``, else ``profiles`` in the journal folder or in the working directory."""
    if folder := env.get("ELASTIC_PROFILES"):
        return Path(folder)
    return Path(env.get("ELASTIC_JOURNAL", "")) / "profiles"


def torch_trace() -> Trace:
    """A profiler of this thread's operators and, with a GPU, its kernels."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities)


class StepProfiler:
    """This rank's profiler. One per process; used by the main thread, except :meth:`request`."""

    SEES_EACH_STEP: ClassVar = True

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

    def begin_world(self, world: World, step: int) -> None:
        """See :class:`StepObserver`."""
        if self._trace is not None:
            self._end()
        self._world, self._step = world, step
        self._begin_if_due(step)

    def committed(self, step: int) -> None:
        """See :class:`StepObserver`."""
        self._step = step
        if self._trace is not None and step >= self._last:
            self._end()
        if self._requested is not None:
            self._begin_if_due(step)

    def end_world(self, ended: str) -> None:
        """See :class:`StepObserver`."""
        self._is_interrupted = self._trace is not None
        if ended != "fault" and self._trace is not None:
            self._end()

    def pause(self) -> None:
        """See :class:`StepObserver`."""
        self.end_world("change")

    def close(self) -> None:
        """See :class:`StepObserver`."""
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
