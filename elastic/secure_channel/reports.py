"""Lines about bad clients: one now and then, with the number of those that were left out."""

from __future__ import annotations

import time
from collections.abc import Callable

Report = Callable[[str], object]
EVERY_S = 10.0


class LimitedReports:
    """For one listener. A flood of bad clients must not fill a disk with lines about it."""

    def __init__(
        self,
        report: Report,
        *,
        every_s: float = EVERY_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report = report
        self._every_s = every_s
        self._monotonic = monotonic
        self._not_before_s = float("-inf")
        self._left_out = 0

    def __call__(self, line: str) -> None:
        now_s = self._monotonic()
        if now_s < self._not_before_s:
            self._left_out += 1
            return
        more = f" ({self._left_out} more such lines were left out)" if self._left_out else ""
        self._not_before_s, self._left_out = now_s + self._every_s, 0
        self._report(line + more)
