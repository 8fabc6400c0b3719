"""The activities that a node's time is spent on, as used by goodput, and stretches of time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise


class Activity(str, Enum):
    """Productive time, or a kind of loss. Each value's comment is its description in reports."""

    PRODUCTIVE = "productive"  # in steps that are part of the final weights
    STARTUP = "start-up"  # from a process's start to its first step
    WAITING_FOR_NODES = "waiting for nodes"  # too few nodes: training is paused
    DATA = "data wait"  # the main thread waits for a batch
    CHECKPOINT = "checkpoint stall"  # training pauses for a save
    STRAGGLING = "straggling"  # in steps, waiting for a rank that was found to be a straggler
    EVALUATION = "evaluation"  # forward passes of a model in eval mode
    RECOMPUTED = "recomputed steps"  # steps that a recovery has discarded
    DETECTION = "detection"  # from the end of the last step until a failure was detected
    ABORT = "abort"  # ending the old process group and its pending operations
    RENDEZVOUS = "rendezvous"  # waiting for the next world
    REBUILD = "rebuild"  # building its process group
    STATE_TRANSFER = "state transfer"  # agreeing on the state, sending or reading it
    FIRST_STEP = "first step"  # the time of the first step in a world in excess of a usual one
    SHUTDOWN = "shutdown"  # after the last step
    UNREPORTED = "unreported"  # a process was killed before it recorded this time
    NO_NODES = "no nodes"  # no process of the run was alive

    @property
    def is_loss(self) -> bool:
        """Whether it is anything but progress."""
        return self is not Activity.PRODUCTIVE


@dataclass(frozen=True, slots=True)
class Stretch:
    """A span of one process's time. ``seconds`` by activity, unordered, add up to its length."""

    start_s: float
    end_s: float
    seconds: Mapping[Activity, float]
    discarded_in: int | None = None  # the generation of its steps that were recomputed later

    @staticmethod
    def of(activity: Activity, start_s: float, end_s: float) -> Stretch:
        """A stretch of time with a single activity."""
        return Stretch(start_s, end_s, {activity: end_s - start_s})


@dataclass(frozen=True, slots=True)
class Interruption:
    """From the end of a node's last step in one world to the end of the first in another."""

    start_s: float
    end_s: float


@dataclass
class Lane:
    """One process: consecutive stretches without a gap between them, and its interruptions."""

    node: str
    stretches: list[Stretch] = field(default_factory=list)
    progress: list[tuple[float, float]] = field(default_factory=list)  # spans of complete steps
    then: Activity | None = None  # the node's activity after its end; None: it was killed

    @property
    def start_s(self) -> float:
        return self.stretches[0].start_s

    @property
    def end_s(self) -> float:
        return self.stretches[-1].end_s


@dataclass(frozen=True)
class Breakdown:
    """Seconds by activity."""

    seconds: Mapping[Activity, float]

    @property
    def total_s(self) -> float:
        """Total seconds of all activities."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The productive fraction, 0 to 1."""
        total_s = self.total_s
        return self.seconds.get(Activity.PRODUCTIVE, 0.0) / total_s if total_s > 0 else 0.0

    @property
    def losses(self) -> list[tuple[Activity, float]]:
        """Kinds of loss with their seconds, largest first."""
        lost = [(a, s) for a, s in self.seconds.items() if a.is_loss and s > 0]
        return sorted(lost, key=lambda pair: -pair[1])


class Weight:
    """An integral over time of a piecewise constant function."""

    def __init__(self, breaks: Iterable[tuple[float, float]]) -> None:
        """``breaks``: ascending times, each with the value from then on; 0 before the first."""
        self._times: list[float] = []
        self._values: list[float] = []
        self._integrals: list[float] = []
        for time_s, value in breaks:
            last = self._integral(time_s)
            self._times.append(time_s)
            self._values.append(value)
            self._integrals.append(last)

    def _integral(self, time_s: float) -> float:
        place = bisect_right(self._times, time_s) - 1
        if place < 0:
            return 0.0
        return self._integrals[place] + self._values[place] * (time_s - self._times[place])

    def mean(self, start_s: float, end_s: float) -> float:
        """The mean of the function between two times; its value if they are equal."""
        if end_s <= start_s:
            place = bisect_right(self._times, start_s) - 1
            return self._values[place] if place >= 0 else 0.0
        return (self._integral(end_s) - self._integral(start_s)) / (end_s - start_s)


def counts(spans: Iterable[tuple[float, float]]) -> list[tuple[float, int]]:
    """The number of concurrent spans: ascending times, each with the number from then on.

    >>> counts([(0, 4), (2, 6)])
    [(0, 1), (2, 2), (4, 1), (6, 0)]
    """
    changes: dict[float, int] = {}
    for start_s, end_s in spans:
        if end_s > start_s:
            changes[start_s] = changes.get(start_s, 0) + 1
            changes[end_s] = changes.get(end_s, 0) - 1
    under_way, result = 0, []
    for time_s in sorted(changes):
        under_way += changes[time_s]
        result.append((time_s, under_way))
    return result


def union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The times within any of the spans, as spans that do not overlap.

    >>> union([(5, 6), (0, 4), (2, 3), (4, 5)])
    [(0, 6)]
    """
    result: list[tuple[float, float]] = []
    for start_s, end_s in sorted(spans):
        if result and start_s <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end_s))
        elif end_s > start_s:
            result.append((start_s, end_s))
    return result


def between(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The gaps between spans that do not overlap, in order.

    >>> between([(0, 1), (3, 4)])
    [(1, 3)]
    """
    return [(a[1], b[0]) for a, b in pairwise(spans) if b[0] > a[1]]
