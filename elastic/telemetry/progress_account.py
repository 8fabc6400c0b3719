"""How much of its time a job's steps took, and when its last checkpoint was committed.

Each agent keeps an account of its own, from what its workers report, so that a new leader can
publish one at once. It is an estimate: the journal's goodput (elastic/telemetry/goodput.py) knows
data waits and stalls of checkpoints, which are in the duration of a step here.
"""

from __future__ import annotations

from collections import deque

_REMEMBERED = 4096  # reports: a recovery goes back to the last checkpoint


class ProgressAccount:
    """Of one node, since ``start_s`` (wall clock, as all times here)."""

    def __init__(self, start_s: float) -> None:
        self.start_s = start_s
        self.checkpoint_step: int | None = None
        self.checkpoint_at_s: float | None = None  # when this node first knew of it
        self._noted_s = start_s
        self._productive_s = 0.0
        # The step that the job was at, and what all until then took; never descending.
        self._marks: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)

    def note(
        self, now_s: float, step: int | None, step_time_s: float, checkpoint_step: int | None
    ) -> None:
        """What is known now; ``step``: of the job, committed. Call it again and again: it sees what
        has changed."""
        if checkpoint_step != self.checkpoint_step:
            self.checkpoint_step = checkpoint_step
            self.checkpoint_at_s = now_s if checkpoint_step is not None else None
        passed_s, self._noted_s = max(0.0, now_s - self._noted_s), now_s
        if step is None:
            return
        while self._marks and self._marks[-1][0] > step:  # a recovery went back
            self._marks.pop()
            self._productive_s = self._marks[-1][1] if self._marks else 0.0
        if self._marks:
            made = step - self._marks[-1][0]
            self._productive_s += min(passed_s, made * step_time_s)
        if not self._marks or self._marks[-1][0] < step:
            self._marks.append((step, self._productive_s))

    def goodput(self, now_s: float) -> float | None:
        """The part of the time, 0 to 1, that went into steps which still count; None before the
        first one."""
        whole_s = now_s - self.start_s
        if self._productive_s <= 0 or whole_s <= 0:
            return None
        return min(1.0, self._productive_s / whole_s)
