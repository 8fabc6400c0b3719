"""Measures on one rank what saves to memory cost, and how long steps take without them."""

from __future__ import annotations

from collections import deque
from statistics import median

from elastic.clock import Clock
from elastic.training.checkpointing.memory_interval.choice import MemoryCosts

FIRST_STEPS = 2  # of a world: they compile, allocate and open connections
FIRST_SAVES = 1  # of a world: its buffers are allocated
_STEPS, _SAVES = 32, 8  # the median of this many recent ones counts, across worlds


class CostMeter:
    """One per process. At each boundary between two steps :meth:`reached`, :meth:`waited` and
    :meth:`left` are called, in this order. A save's cost is the time to begin it, and the wait at
    the next boundary until its share is written."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._waits: deque[float] = deque(maxlen=_SAVES)
        self._writes: deque[float] = deque(maxlen=_SAVES)
        self.enter_world()

    def enter_world(self) -> None:
        """Begin a world: its first steps and its first save do not count."""
        self.saves = 0  # completed in this world
        self._boundaries = 0
        self._step = 0
        self._reached_s = self._waited_s = self._left_s = 0.0
        self._has_saved = False  # the writers have, at the last boundary
        self._began_in_s: float | None = None  # this rank's part of that save

    def reached(self, step: int) -> None:
        """Record that a boundary is reached, with ``step`` steps done."""
        self._reached_s = self._clock.monotonic()
        if self._boundaries > FIRST_STEPS and step > self._step:
            self._steps.append((self._reached_s - self._left_s) / (step - self._step))
        self._boundaries += 1
        self._step = step

    def waited(self) -> bool:
        """Record the end of the wait for the last save. Returns whether there was one."""
        self._waited_s = self._clock.monotonic()
        if not self._has_saved:
            return False
        self.saves += 1
        if self._began_in_s is not None and self.saves > FIRST_SAVES:
            self._waits.append(self._began_in_s + self._waited_s - self._reached_s)
        self._has_saved, self._began_in_s = False, None
        return True

    def left(self, *, has_saved: bool, is_writer: bool = True) -> None:
        """Record that the boundary is left, and whether a save has begun at it. A rank that writes
        no part counts the saves of the others, and has no costs."""
        self._left_s = self._clock.monotonic()
        self._has_saved = has_saved
        if has_saved and is_writer:
            self._began_in_s = self._left_s - self._waited_s

    def wrote(self, write_s: float) -> None:
        """Record that a share was written while training continued."""
        self._writes.append(write_s)

    def costs(self, every_steps: int | None) -> MemoryCosts:
        """The medians of recent measurements, with the interval in use."""
        return MemoryCosts(
            every_steps=every_steps,
            wait_s=_median(self._waits),
            write_s=_median(self._writes),
            step_s=_median(self._steps),
        )


def _median(values: deque[float]) -> float | None:
    return median(values) if values else None
