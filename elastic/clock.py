"""Time as an argument. Nothing else in this package reads a clock or sleeps.

Decisions take ``now``; what must wait takes a :class:`Clock`, so that tests can own time.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """What this package needs of time."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary point; never goes back. For intervals."""
        ...

    def boottime(self) -> float:
        """Seconds since the machine booted, those it was suspended included; the same for all
        its processes. For what must end even if whoever granted it sleeps."""
        ...

    def wall(self) -> float:
        """Seconds since 1970 (UTC). For records and people, never for decisions."""
        ...

    def sleep(self, seconds: float) -> None:
        """Block this thread."""
        ...

    def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        """Block until ``event`` is set, at most ``timeout_s``; says whether it is."""
        ...


class SystemClock:
    """The machine's clock."""

    monotonic = staticmethod(time.monotonic)  # no call in between: every step reads it

    def boottime(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        return event.wait(timeout_s)


class ManualClock:
    """A clock that moves only when told to: for tests."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def monotonic(self) -> float:
        return self._now

    def boottime(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        if not event.is_set() and timeout_s is not None:
            self.advance(timeout_s)
        return event.is_set()

    def advance(self, seconds: float) -> None:
        """Move forward by ``seconds`` (not negative)."""
        if seconds < 0:
            raise ValueError(f"time does not go back: advance({seconds})")
        self._now += seconds


SYSTEM_CLOCK = SystemClock()
