"""Waits for conditions in tests, with one timeout for all."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
# For events that must happen eventually: a long timeout costs nothing if a wait succeeds, and a
# shared machine may be ten times slower. Guaranteed times are checked with the ledger's times, or
# with a limit scaled by elastic.testing.slowness.
PATIENCE_S = 180.0
_POLL_S = 0.01
_MAX_BUSY = 0.2  # of a core, for checks: listing checkpoints or reading a ledger takes milliseconds


def eventually(
    condition: Callable[[], T | None],
    what: str = "the condition",
    within_s: float = PATIENCE_S,
    *,
    poll_s: float = _POLL_S,
) -> T:
    """Poll until ``condition()`` is true, and return its value.

    ``poll_s`` is the least pause between two polls, for conditions that other processes work for.
    Raises AssertionError with ``what`` after ``within_s``.
    """
    deadline_s = time.monotonic() + within_s
    while True:
        began_s = time.thread_time()
        if value := condition():
            return value
        assert time.monotonic() < deadline_s, f"not within {within_s:g} s: {what}"
        time.sleep(pause_s(time.thread_time() - began_s, poll_s))


def pause_s(check_s: float, least_s: float) -> float:
    """How long to wait between two checks of a condition that takes ``check_s`` of CPU time."""
    return max(least_s, check_s / _MAX_BUSY - check_s)
