"""Traces of a few steps by torch.profiler: one file per rank, begun and ended between two steps.

The script asks for them (``run.profile``), or somebody outside (``elastic profile``), whose request
comes over the link to the agent. In a world that breaks, the trace ends once the next world has
begun: ending one waits for the device, where collectives of lost peers may hang until then.
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
    """What is needed of ``torch.profiler.profile``."""

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def export_chrome_trace(self, path: str) -> None: ...


@dataclass(frozen=True)
class ProfileRequest:
    """The steps numbered ``first`` (None: from the next one on) and so many."""

    steps: int
    first: int | None = None
    ranks: tuple[int, ...] = ()  # none: all


def request_of(steps: int | range, ranks: tuple[int, ...]) -> ProfileRequest:
    """Raises ConfigError for steps or ranks that cannot be."""
    count = len(steps) if isinstance(steps, range) else steps
    is_plain = not isinstance(steps, range) or steps.step == 1
    if isinstance(count, bool) or not 1 <= count <= LONGEST_STEPS or not is_plain:
        raise ConfigError(
            f"run.profile(steps={steps!r}): not 1 to {LONGEST_STEPS} steps in a row",
            hint="run.profile(steps=10), or run.profile(steps=range(100, 110))",
        )
    if any(rank < 0 for rank in ranks):
        raise ConfigError(f"run.profile(ranks={ranks!r}): ranks are counted from 0")
    return ProfileRequest(count, steps.start if isinstance(steps, range) else None, ranks)


def traces_folder(env: Mapping[str, str] = os.environ) -> Path:
    """``ELASTIC_PROFILES``; else ``profiles`` in the folder of journals, or here."""
    if folder := env.get("ELASTIC_PROFILES"):
        return Path(folder)
    return Path(env.get("ELASTIC_JOURNAL", "")) / "profiles"


def torch_trace() -> Trace:
    """Of this thread's operators and, where there is a GPU, its kernels."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities)


class StepProfiler:
    """One per process. The main thread calls it, but for :meth:`ask`."""

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
        self._asked: ProfileRequest | None = None
        self._trace: Trace | None = None
        self._world: World | None = None
        self._began_in = 0  # generation
        self._first = self._last = self._step = 0
        self._is_interrupted = False

    def ask(self, request: ProfileRequest) -> bool:
        """Begin at the next boundary, or that of its first step. False: one is asked for, or runs,
        already. From any thread."""
        with self._lock:
            if self._asked is not None or self._trace is not None:
                return False
            self._asked = request
            return True

    # -- what happens in training --------------------------------------------------------------

    def begin_world(self, world: World, step: int) -> None:
        """Training continues in a world, after ``step`` steps."""
        if self._trace is not None:
            self._end()
        self._world, self._step = world, step
        self._begin_if_asked(step)

    def committed(self, step: int) -> None:
        """That many steps have taken effect."""
        self._step = step
        if self._trace is not None and step >= self._last:
            self._end()
        if self._asked is not None:
            self._begin_if_asked(step)

    def end_world(self, ended: str) -> None:
        """The world is over, or the process ends."""
        self._is_interrupted = self._trace is not None
        if ended != "fault" and self._trace is not None:
            self._end()

    def pause(self) -> None:
        """Nothing is trained in this world."""
        self.end_world("change")

    def close(self) -> None:
        """The process ends."""
        if self._trace is not None and not self._is_interrupted:
            self._end()

    # -- the trace -----------------------------------------------------------------------------

    def _begin_if_asked(self, step: int) -> None:
        request, world = self._asked, self._world
        if request is None or world is None:
            return
        first = step if request.first is None else request.first
        if step < first:
            return
        with self._lock:
            self._asked = None
        last = first + request.steps
        if step >= last or (request.ranks and world.rank not in request.ranks):
            return  # a job that resumes later than that
        try:
            trace = self._begin()
            trace.start()
        except Exception as error:  # noqa: BLE001 - of torch's profiler: training goes on
            get_logger().warning("no profile of steps %d to %d: %s", step, last, error)
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
        except Exception as error:  # noqa: BLE001 - of torch's profiler, or the disk
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
