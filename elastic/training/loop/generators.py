"""Detects generators that the script created before ``run.retry`` called its function.

``self.batches = cycle(loader)`` in ``__init__`` outlives the function: after a change of the world,
``next(self.batches)`` would yield batches of the ended world, or stop.
"""

from __future__ import annotations

import gc
import inspect
import sys
import weakref
from types import FrameType, GeneratorType
from typing import Any

from elastic.errors import TrainingError


class EarlierGenerators:
    """The generators older than the first attempt. One per process."""

    def __init__(self) -> None:
        self._known: weakref.WeakSet[GeneratorType[Any, Any, Any]] = weakref.WeakSet()

    def note(self) -> None:
        """Record all generators at the start of the first attempt.

        A generator that is running now has called ``run.retry``, and is not recorded. Takes about
        50 ms of CPU time at 366,000 objects [measured on a busy machine].
        """
        found = [one for one in gc.get_objects() if type(one) is GeneratorType]
        self._known.update(one for one in found if not one.gi_running)

    def refuse(self) -> None:
        """Raise TrainingError if a recorded generator requested an item from the calling one."""
        callers = _generators(sys._getframe(1))
        if any(one.gi_frame in callers for one in self._known):
            raise created_too_early()


def created_too_early() -> TrainingError:
    """The error for an iterator that was created before the call of the function that reads it."""
    return TrainingError(
        "an iterator over the loader was created before run.retry called the function that reads "
        "it: after a change of the world it would yield batches of the ended world",
        hint="create it in that function, as a local variable: batches = cycle(loader), "
        "batches = iter(loader)",
    )


def _generators(frame: FrameType | None) -> list[FrameType]:
    """The frame and its callers, for as long as they are generators."""
    frames = []
    while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
        frames.append(frame)
        frame = frame.f_back
    return frames
