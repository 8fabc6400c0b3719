"""Sums up the phases that a worker's main thread has recorded: their durations, by phase and by
step.

The thread records pairs of numbers: a phase and its nanoseconds, or one of the marks below and a
number. It sums them up periodically, not in each step: code that runs once per step runs from cold
caches, which costs ten times as much as the same code in a loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic.hangs.facts import DATA, Phase
from elastic.stragglers.facts import StepPart
from elastic.stragglers.windows import StepWindows

COMMITTED = -1  # a step was; the number: when, in ns of the monotonic clock
SAMPLES = -2  # that many are this rank's from now on
OWN_LOADER = -3  # in the DATA that ends next the script reads a data set beside the training one

# Of the longest that a phase took, the fraction kept after each step: half after 35.
_KEPT_PER_STEP = 0.98
_SMOOTHING = 0.1

# The part of a step's time to which a phase belongs.
_PARTS = {
    Phase.DATA: StepPart.DATA,
    Phase.COMPUTE: StepPart.COMPUTE,
    Phase.OPTIMIZER: StepPart.COMPUTE,
    Phase.COLLECTIVE: StepPart.COLLECTIVE,
    Phase.CHECKPOINT: StepPart.CHECKPOINT,
}
_NO_PARTS_S = [0.0] * len(StepPart)


class _PhaseSum:
    """The durations of one phase, in seconds."""

    __slots__ = ("committed_s", "longest_s", "part", "peak_s", "present_s", "typical_s")

    def __init__(self, phase: Phase) -> None:
        self.part = int(_PARTS.get(phase, StepPart.SCRIPT))
        self.committed_s = 0.0  # the total when the last step was committed
        self.present_s = 0.0  # since then
        self.forget_durations()

    def forget_durations(self) -> None:
        self.longest_s = 0.0  # when the last step was committed
        self.peak_s = 0.0  # the same until now
        self.typical_s = 0.0


class PhaseSums:
    """The durations of the phases: in total, recently, and in the current step."""

    def __init__(self) -> None:
        self._of = tuple(map(_PhaseSum, Phase))
        self.committed_ns = 0  # when the last step was committed
        self._samples = 0  # of this rank in the current step
        self._is_own_loader = False
        self._own_loader_s = 0.0  # of the current step's DATA

    @property
    def total_s(self) -> list[float]:
        """The total time of each phase."""
        return [one.committed_s + one.present_s for one in self._of]

    @property
    def committed_s(self) -> list[float]:
        """The same when the last step was committed."""
        return [one.committed_s for one in self._of]

    @property
    def longest_s(self) -> list[float]:
        """The longest recent duration of each phase, when the last step was committed."""
        return [one.longest_s for one in self._of]

    @property
    def typical_s(self) -> list[float]:
        """The smoothed duration of each phase."""
        return [one.typical_s for one in self._of]

    def forget_durations(self) -> None:
        """Forget recent durations, which do not predict later ones."""
        for one in self._of:
            one.forget_durations()

    def add(self, noted: Sequence[int], windows: StepWindows | None) -> bool:
        """Sum up the records, in their order; returns whether a step was committed.

        ``windows``: receives the times of steps.
        """
        of, is_own_loader, is_committed = self._of, self._is_own_loader, False
        pairs = iter(noted)
        # One loop without calls: a call for each phase would double its cost.
        for what, number in zip(pairs, pairs, strict=True):
            if what >= 0:
                one, took_s = of[what], number * 1e-9
                one.present_s += took_s
                one.typical_s += _SMOOTHING * (took_s - one.typical_s)
                if took_s > one.peak_s:
                    one.peak_s = took_s
                if is_own_loader and what == DATA:
                    is_own_loader = False
                    self._own_loader_s += took_s
            elif what == COMMITTED:
                is_committed = True
                self._commit(number, windows)
            elif what == SAMPLES:
                self._samples = number
            else:
                is_own_loader = True
        self._is_own_loader = is_own_loader
        return is_committed

    def _commit(self, at_ns: int, windows: StepWindows | None) -> None:
        parts_s = _NO_PARTS_S.copy()
        for one in self._of:
            if one.present_s or one.peak_s:  # few phases are in use
                parts_s[one.part] += one.present_s
                one.committed_s += one.present_s
                one.present_s = 0.0
                one.longest_s = one.peak_s
                one.peak_s *= _KEPT_PER_STEP
        self.committed_ns = at_ns
        if self._own_loader_s:
            parts_s[StepPart.DATA] -= self._own_loader_s
            parts_s[StepPart.SCRIPT] += self._own_loader_s
            self._own_loader_s = 0.0
        if windows is not None:
            windows.add(parts_s, self._samples, at_ns)
