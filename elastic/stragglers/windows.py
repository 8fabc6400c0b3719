"""Measures a worker's step times, window by window.

The training thread adds each step when it commits, which costs less than a microsecond; the link's
thread takes the last window. A window has a length in seconds and a minimum number of steps, so
that a single step has little influence: the slowest tenth, with garbage collections, compilations
or pauses of the machine, is excluded from the means.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from elastic.stragglers.facts import StepDurations, StepPart

MIN_STEPS = 8  # of a window
# More steps than these add no information, and would have to be kept and sorted.
MAX_STEPS = 1000
_SLOWEST_TENTH = 10

_Step = tuple[float, int, tuple[float, ...]]  # own time, samples, time by part


class StepWindows:
    """One per process. It measures nothing before :meth:`measure`."""

    def __init__(self) -> None:
        self._window_ns = 0
        self._generation = 0
        self._began_ns = 0
        self._number = 0
        self._steps: list[_Step] = []
        self._closed: deque[StepDurations] = deque(maxlen=1)

    def measure(self, window_s: float) -> None:
        """Windows are this long from now on; 0: nothing is measured. From any thread."""
        self._window_ns = int(window_s * 1e9)

    def take(self) -> StepDurations | None:
        """The last window that has ended and was not taken. From any thread."""
        try:
            return self._closed.popleft()
        except IndexError:
            return None

    def restart(self, generation: int, now_ns: int) -> None:
        """Another world, or one of its first steps: earlier measurements are discarded."""
        self._generation, self._began_ns = generation, now_ns
        self._steps.clear()

    def add(self, parts_s: Sequence[float], samples: int, now_ns: int) -> None:
        """A step has committed. ``parts_s`` by :class:`StepPart`."""
        if not self._window_ns:
            return
        steps = self._steps
        if len(steps) < MAX_STEPS:
            steps.append((parts_s[0] + parts_s[1], samples, tuple(parts_s)))
        if now_ns - self._began_ns >= self._window_ns and len(steps) >= MIN_STEPS:
            self._number += 1
            self._closed.append(summarize(steps, self._generation, self._number))
            self.restart(self._generation, now_ns)


def summarize(steps: Sequence[_Step], generation: int, window: int) -> StepDurations:
    """The means of the steps, without the slowest tenth, at least one of them."""
    slowest = -(-len(steps) // _SLOWEST_TENTH)
    counted = sorted(steps)[: len(steps) - slowest]
    sums = [sum(part) for part in zip(*(parts for _, _, parts in counted), strict=True)]
    means = [total / len(counted) for total in sums]
    return StepDurations(
        generation=generation,
        window=window,
        steps=len(counted),
        samples=sum(samples for _, samples, _ in counted),
        data_s=means[StepPart.DATA],
        compute_s=means[StepPart.COMPUTE],
        collective_s=means[StepPart.COLLECTIVE],
        checkpoint_s=means[StepPart.CHECKPOINT],
        script_s=means[StepPart.SCRIPT],
    )


step_windows = StepWindows()
"""The windows of this process."""
