"""A clock controlled by a test."""

from __future__ import annotations

import threading


class ManualClock:
    """An :class:`elastic.errors.Clock` that only a test advances."""

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
