"""Adds up what a worker's main thread has noted of its phases: how long they took, by phase and by
step.

The thread notes numbers, in pairs: a phase and the nanoseconds that it took, or one of the marks
below and a number. It adds them up every now and then, not in each step: what runs once in a step
runs from cold caches, which costs ten times as much as the same in a loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic.hangs.facts import Phase
from elastic.stragglers.facts import StepPart
from elastic.stragglers.windows import StepWindows

COMMITTED = -1  # a step was; the number: when, in ns of the monotonic clock
SAMPLES = -2  # that many are this rank's from now on
OWN_LOADER = -3  # in the DATA that ends next the script reads a data set beside the training one

# Of the longest that a phase took, the fraction kept after each step: half after 35.
_KEPT_PER_STEP = 0.98
_SMOOTHING = 0.1

# What a phase counts as in the times of steps. By number: this is looked up in every phase.
_PARTS = tuple(
    {
        Phase.DATA: StepPart.DATA,
        Phase.COMPUTE: StepPart.COMPUTE,
        Phase.OPTIMIZER: StepPart.COMPUTE,
        Phase.COLLECTIVE: StepPart.COLLECTIVE,
        Phase.CHECKPOINT: StepPart.CHECKPOINT,
    }.get(phase, StepPart.SCRIPT)
    for phase in Phase
)


class PhaseSums:
    """What the phases took: all in all, lately, and in the present step."""

    def __init__(self) -> None:
        self.total_s = [0.0] * len(Phase)
        self.committed_s = self.total_s.copy()  # of it: when the last step was committed
        self.committed_ns = 0
        self._parts_s = [0.0] * len(StepPart)  # of the present step
        self._samples = 0  # of this rank in it
        self._is_own_loader = False
        self.forget_durations()

    def forget_durations(self) -> None:
        """What phases took so far says nothing of what comes."""
        self.longest_s = [0.0] * len(Phase)  # when the last step was committed
        self.typical_s = [0.0] * len(Phase)
        self._longest_s = [0.0] * len(Phase)

    def add(self, noted: Sequence[int], windows: StepWindows | None) -> bool:
        """Add up what was noted, in its order; says whether a step was committed.

        ``windows``: where the times of steps go.
        """
        is_committed = False
        pairs = iter(noted)
        for what, number in zip(pairs, pairs, strict=True):
            if what >= 0:
                self._left(what, number * 1e-9)
            elif what == COMMITTED:
                is_committed = True
                self._commit(number, windows)
            elif what == SAMPLES:
                self._samples = number
            else:
                self._is_own_loader = True
        return is_committed

    def _left(self, phase: int, took_s: float) -> None:
        self.total_s[phase] += took_s
        if took_s > self._longest_s[phase]:
            self._longest_s[phase] = took_s
        self.typical_s[phase] += _SMOOTHING * (took_s - self.typical_s[phase])
        part = _PARTS[phase]
        if self._is_own_loader and phase == Phase.DATA:
            part, self._is_own_loader = StepPart.SCRIPT, False
        self._parts_s[part] += took_s

    def _commit(self, at_ns: int, windows: StepWindows | None) -> None:
        self.committed_ns, self.committed_s = at_ns, self.total_s.copy()
        if windows is not None:
            windows.add(self._parts_s, self._samples, at_ns)
        self._parts_s = [0.0] * len(StepPart)
        self.longest_s = self._longest_s
        self._longest_s = [_KEPT_PER_STEP * took_s for took_s in self.longest_s]
