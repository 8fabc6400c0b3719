"""Time as an argument. Nothing else in this package reads a clock or sleeps.

Decisions take ``now``; code that waits takes a :class:`Clock`, so that tests control time.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """Every operation on time that this package uses."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary point; never goes back. For intervals."""
        ...

    def boottime(self) -> float:
        """Seconds since the machine booted, including suspended time; the same for all its
        processes. For permissions that must expire even while the granting process sleeps."""
        ...

    def wall(self) -> float:
        """Seconds since 1970 (UTC). For records and users, never for decisions."""
        ...

    def sleep(self, seconds: float) -> None:
        """Block this thread."""
        ...

    def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        """Block until ``event`` is set, at most ``timeout_s``; returns whether it is."""
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


SYSTEM_CLOCK = SystemClock()
