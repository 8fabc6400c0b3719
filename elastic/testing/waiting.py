"""Waiting for something in a test: for the event itself, with one patience for all."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
# For whatever must happen some day: a wait that succeeds costs nothing, and a machine that other
# tests use, too, may be ten times slower. Promised times are compared with times of the ledger, or
# with a limit that grows with elastic.testing.slowness.
PATIENCE_S = 180.0
_POLL_S = 0.01


def eventually(
    condition: Callable[[], T | None], what: str = "the condition", within_s: float = PATIENCE_S
) -> T:
    """Poll until ``condition()`` is true, and return its value.

    Raises AssertionError with ``what`` after ``within_s``.
    """
    deadline_s = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, f"not within {within_s:g} s: {what}"
        time.sleep(_POLL_S)
    return value
