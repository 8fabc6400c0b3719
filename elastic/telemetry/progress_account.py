"""Estimates a job's goodput, and records when its last checkpoint was committed.

Each agent keeps its own account from its workers' reports, so that a new leader can
publish one immediately. It is an estimate: the journal's goodput (elastic/telemetry/goodput.py) has
data waits and checkpoint stalls, which are part of a step's duration here.
"""

from __future__ import annotations

from collections import deque

_REMEMBERED = 4096  # reports: a recovery may return to the last checkpoint


class ProgressAccount:
    """Progress of one node since ``start_s`` (wall clock, like all times here)."""

    def __init__(self, start_s: float) -> None:
        self.start_s = start_s
        self.checkpoint_step: int | None = None
        self.checkpoint_at_s: float | None = None  # when this node learned of it
        self._noted_s = start_s
        self._productive_s = 0.0
        # Steps, each with the total time of all steps until then; non-decreasing.
        self._marks: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)

    def note(
        self, now_s: float, step: int | None, step_time_s: float, checkpoint_step: int | None
    ) -> None:
        """Update the account; ``step``: the job's committed step. Idempotent; call it
        periodically."""
        if checkpoint_step != self.checkpoint_step:
            self.checkpoint_step = checkpoint_step
            self.checkpoint_at_s = now_s if checkpoint_step is not None else None
        passed_s, self._noted_s = max(0.0, now_s - self._noted_s), now_s
        if step is None:
            return
        while self._marks and self._marks[-1][0] > step:  # a recovery discarded steps
            self._marks.pop()
            self._productive_s = self._marks[-1][1] if self._marks else 0.0
        if self._marks:
            made = step - self._marks[-1][0]
            self._productive_s += min(passed_s, made * step_time_s)
        if not self._marks or self._marks[-1][0] < step:
            self._marks.append((step, self._productive_s))

    def goodput(self, now_s: float) -> float | None:
        """The fraction of time, 0 to 1, spent in steps that still count; None before the
        first one."""
        whole_s = now_s - self.start_s
        if self._productive_s <= 0 or whole_s <= 0:
            return None
        return min(1.0, self._productive_s / whole_s)
