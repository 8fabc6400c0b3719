"""The account of where a job's time went."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from math import inf, isfinite

from elastic.telemetry.reader import JournalRecord, JournalWriter, RunJournal, Window
from elastic.tuning.intervals import (
    STEP_TIMES_S,
)

# A killed worker loses records of less than this. One that was silent for longer had hung before,
# and goodput counts that as time until detection.
UNREPORTED_S = 2 * STEP_TIMES_S
# Goodput merges the windows of a rank into windows of this length: a week of training is read in
# seconds.
MERGED_WINDOWS_S = 300.0

# ----------------------------------------------------------------------------
# The activities that a node's time is spent on, as used by goodput, and stretches of time.


class Activity(str, Enum):
    """Productive time, or a kind of loss. Each value's comment is its description in reports."""

    PRODUCTIVE = "productive"  # in steps that are part of the final weights
    STARTUP = "start-up"  # from a process's start to its first step
    WAITING_FOR_NODES = "waiting for nodes"  # too few nodes: training is paused
    DATA = "data wait"  # the main thread waits for a batch
    CHECKPOINT = "checkpoint stall"  # training pauses for a save
    STRAGGLING = "straggling"  # in steps, waiting for a rank that was found to be a straggler
    EVALUATION = "evaluation"  # forward passes of a model in eval mode
    RECOMPUTED = "recomputed steps"  # committed steps that a recovery has discarded
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


# ----------------------------------------------------------------------------
# The time that ranks of a world wait for its stragglers, by the leader's verdicts. Pure.

WANTED = frozenset({"straggler-found", "straggler-recovered"})


@dataclass(frozen=True, slots=True)
class Straggling:
    """One straggler, from its verdict until it has recovered or its world is over."""

    rank: int
    start_s: float
    end_s: float
    lag_s: float  # how long the others wait in each step
    is_data_wait: bool  # the straggler's own time is counted as data wait

    def holds_up(self, window: Window, end_s: float) -> float:
        """By how many seconds it delayed a window that ended at ``end_s``."""
        if self.is_data_wait and window.rank == self.rank:
            return 0.0
        start_s = end_s - window.duration_s
        both_s = min(end_s, self.end_s) - max(start_s, self.start_s)
        if both_s <= 0:
            return 0.0
        return self.lag_s * (window.steps or 0) * both_s / window.duration_s


def held_up_s(stragglers: Iterable[Straggling], window: Window, end_s: float) -> float:
    """Productive time of a window that was spent waiting for the slowest straggler."""
    longest_s = max((straggler.holds_up(window, end_s) for straggler in stragglers), default=0.0)
    return max(0.0, min(longest_s, window.productive_s))


def stragglings(verdicts: Iterable[JournalRecord]) -> Mapping[int, Sequence[Straggling]]:
    """Stragglers by generation, from the verdicts of all leaders of a run."""
    by_generation: dict[int, list[Straggling]] = defaultdict(list)
    since: dict[tuple[int, int], JournalRecord] = {}
    for record in sorted(verdicts, key=lambda record: record.at_s):
        generation, rank = record.whole("generation"), record.whole("rank")
        if generation is None or rank is None:
            continue
        if record.name == "straggler-found":
            since.setdefault((generation, rank), record)
        elif (verdict := since.pop((generation, rank), None)) is not None:
            by_generation[generation].append(_straggling(rank, verdict, record.at_s))
    for (generation, rank), verdict in since.items():
        by_generation[generation].append(_straggling(rank, verdict, float("inf")))
    return by_generation


def _straggling(rank: int, verdict: JournalRecord, end_s: float) -> Straggling:
    return Straggling(
        rank=rank,
        start_s=verdict.at_s,
        end_s=end_s,
        lag_s=max(0.0, verdict.number("lag_s")),
        is_data_wait=verdict.text("cause") == Activity.DATA.value,
    )


# ----------------------------------------------------------------------------
# The steps of a run, by world, and the steps that a later world repeated.

_LAST_WINDOWS = 1000


@dataclass(frozen=True)
class StepHistory:
    """The combined windows of all ranks."""

    usual_s: Mapping[int, float]  # by generation: productive time of a step, without the first
    windows: Mapping[int, Sequence[Window]]  # by generation: the last ones of all ranks
    cuts: Mapping[int, int]  # by generation: the step after which a later world repeated its steps
    newest: int  # generation with steps; 0: none
    first_step: int
    last_step: int
    recomputed_steps: int
    stragglers: Mapping[int, Sequence[Straggling]]  # by generation

    def shares_of(self, generation: int) -> dict[Activity, float]:
        """The activities of its windows as fractions of 1; empty without windows."""
        sums: dict[Activity, float] = defaultdict(float)
        for window in self.windows.get(generation, ()):
            discarded = discarded_part(window, self.cuts.get(generation))
            for activity, took_s in parts_of(window, discarded).items():
                sums[activity] += took_s
        whole_s = sum(sums.values())
        return {a: took_s / whole_s for a, took_s in sums.items()} if whole_s > 0 else {}

    def usual_of(self, generation: int) -> float | None:
        """Median step time of the generation, or of the nearest generation with data."""
        known = self.usual_s.get(generation)
        if known is not None or not self.usual_s:
            return known
        return self.usual_s[min(self.usual_s, key=lambda g: abs(g - generation))]


class _WorldSteps:
    """Sums over one world."""

    __slots__ = ("begin", "end", "is_stepping", "productive_s", "steps", "windows")

    def __init__(self, begin: int) -> None:
        self.begin = begin
        self.end: int | None = None
        self.is_stepping = False
        self.steps, self.productive_s = 0, 0.0
        self.windows: deque[Window] = deque(maxlen=_LAST_WINDOWS)

    def add(self, window: Window, step: int, made: int) -> None:
        """Add a window of ``made`` steps that ends with ``step``."""
        if self.end is None or step > self.end:
            self.end = step
        if made <= 0:
            return
        self.is_stepping = True
        if window.ended != "first-step":
            self.windows.append(window)
            self.productive_s += window.productive_s
            self.steps += made


def step_history(records: Iterable[JournalRecord]) -> StepHistory:
    """The history from the windows of all ranks of a run. Fast for a million of them."""
    worlds: dict[int, _WorldSteps] = {}
    verdicts: list[JournalRecord] = []
    for record in records:
        if record.name == "rank-times":
            window = record.window
            generation, step = window.generation, window.step
            if generation is not None and step is not None:
                made = window.steps or 0
                world = _begun(worlds, generation, step - made if made > 0 else step)
                world.add(window, step, made)
        elif record.name == "world-joined":
            generation, step = record.whole("generation"), record.whole("step")
            if generation is not None and step is not None:
                _begun(worlds, generation, step)
        elif record.name in WANTED:
            verdicts.append(record)
    return _history(worlds, stragglings(verdicts))


def _begun(worlds: dict[int, _WorldSteps], generation: int, step: int) -> _WorldSteps:
    """The world of the generation; it began with ``step`` or earlier."""
    world = worlds.get(generation)
    if world is None:
        world = worlds[generation] = _WorldSteps(step)
    elif step < world.begin:
        world.begin = step
    return world


def _history(
    worlds: Mapping[int, _WorldSteps], stragglers: Mapping[int, Sequence[Straggling]]
) -> StepHistory:
    cuts = _cuts({g: world.begin for g, world in worlds.items()})
    ends = {g: world.end for g, world in worlds.items() if world.end is not None}
    return StepHistory(
        usual_s={g: w.productive_s / w.steps for g, w in worlds.items() if w.steps},
        windows={g: tuple(w.windows) for g, w in worlds.items() if w.steps},
        cuts=cuts,
        newest=max((g for g, world in worlds.items() if world.is_stepping), default=0),
        first_step=min((world.begin for world in worlds.values()), default=0),
        last_step=max(ends.values(), default=0),
        recomputed_steps=sum(max(0, ends[g] - cuts[g]) for g in ends if g in cuts),
        stragglers=stragglers,
    )


def parts_of(window: Window, discarded: float, straggling_s: float = 0.0) -> dict[Activity, float]:
    """Seconds by activity, without the step that had not ended. ``straggling_s`` is a part of the
    productive time."""
    parts = {
        Activity.DATA: max(0.0, window.data_s),
        Activity.CHECKPOINT: max(0.0, window.checkpoint_s),
        Activity.EVALUATION: max(0.0, window.evaluation_s),
    }
    productive_s = max(0.0, window.productive_s)
    parts[Activity.RECOMPUTED] = productive_s * discarded
    parts[Activity.STRAGGLING] = straggling_s * (1 - discarded)
    parts[Activity.PRODUCTIVE] = (productive_s - straggling_s) * (1 - discarded)
    return parts


def discarded_part(window: Window, cut: int | None) -> float:
    """The fraction of the window's steps that a later generation, from step ``cut`` on,
    repeated."""
    steps = window.steps or 0
    if cut is None or steps <= 0:
        return 0.0
    last = window.step or 0
    return min(1.0, max(0, last - max(cut, last - steps)) / steps)


def _cuts(begins: Mapping[int, int]) -> dict[int, int]:
    cuts: dict[int, int] = {}
    lowest: int | None = None
    for generation in sorted(begins, reverse=True):
        if lowest is not None:
            cuts[generation] = lowest
        lowest = begins[generation] if lowest is None else min(lowest, begins[generation])
    return cuts


# ----------------------------------------------------------------------------
# The activities of each process from its first line to its last: one lane of stretches each.
#
# A worker's lane consists of its summed windows (``rank-times``) and the events of
# its recoveries. An agent's lane covers the time in which a node had no worker.

# The measured phases of a recovery, fields of the event ``recovered``.
LAPS = (
    ("leave_s", Activity.ABORT),
    ("wait_s", Activity.RENDEZVOUS),
    ("paused_s", Activity.WAITING_FOR_NODES),
    ("build_s", Activity.REBUILD),
    ("agree_s", Activity.STATE_TRANSFER),
    ("wrap_s", Activity.REBUILD),
)


def _scaled(
    start_s: float,
    end_s: float,
    parts: Mapping[Activity, float],
    discarded_in: int | None = None,
) -> Stretch:
    """A stretch with the measured parts, scaled to its length on the common clock."""
    scale = sum(parts.values()) / (end_s - start_s)
    if scale <= 0:
        parts, scale = {Activity.PRODUCTIVE: end_s - start_s}, 1.0
    seconds = {activity: took_s / scale for activity, took_s in parts.items() if took_s > 0}
    return Stretch(start_s, end_s, seconds, discarded_in)


# Workers -----------------------------------------------------------------------------------------

# Events that end a sum of windows.
_ENDS_SUM = frozenset(
    {"rank-times", "recovered", "world-fault", "state-restored", "world-joined", "run-closed"}
)


class _WindowSum:
    """Consecutive windows of complete steps in one world, none of which was repeated."""

    def __init__(self, start_s: float, cut: int | None, stragglers: Sequence[Straggling]) -> None:
        self.start_s = self.end_s = start_s
        self.cut = cut  # a later world repeated the steps after it
        self.productive_s = self.data_s = self.checkpoint_s = self.evaluation_s = 0.0
        self.straggling_s = 0.0  # of the productive time
        self._stragglers = stragglers

    def add(self, window: Window, end_s: float) -> None:
        self.end_s = end_s
        if window.productive_s > 0:
            self.productive_s += window.productive_s
        if window.data_s > 0:
            self.data_s += window.data_s
        if window.checkpoint_s > 0:
            self.checkpoint_s += window.checkpoint_s
        if window.evaluation_s > 0:
            self.evaluation_s += window.evaluation_s
        if self._stragglers:
            self.straggling_s += held_up_s(self._stragglers, window, end_s)

    @property
    def seconds(self) -> dict[Activity, float]:
        return {
            Activity.PRODUCTIVE: self.productive_s - self.straggling_s,
            Activity.STRAGGLING: self.straggling_s,
            Activity.DATA: self.data_s,
            Activity.CHECKPOINT: self.checkpoint_s,
            Activity.EVALUATION: self.evaluation_s,
        }


def worker_lane(writer: JournalWriter, facts: StepHistory) -> Lane | None:
    """From the process's first line to its last; None if it wrote only one."""
    lane = _WorkerLane(writer, facts)
    for record in writer.records:
        lane.take(record)
    lane.end(writer.records[-1].at_s)
    return lane.lane if lane.lane.stretches else None


class _WorkerLane:
    def __init__(self, writer: JournalWriter, facts: StepHistory) -> None:
        self.lane = Lane(writer.node)
        self._facts = facts
        self._cursor_s = writer.records[0].at_s
        self._meanwhile = Activity.STARTUP  # the activity of time that no event accounts for
        self._generation: int | None = None  # of the last window
        self._sum: _WindowSum | None = None

    def take(self, record: JournalRecord) -> None:
        if record.name == "rank-times" and self._sum_up(record.window, record.at_s):
            return
        if record.name in _ENDS_SUM:
            self._flush()
        match record.name:
            case "rank-times":
                self._window(record.window, record.at_s)
            case "recovered":
                self._laps(record)
            case "world-fault":
                self._meanwhile = Activity.RENDEZVOUS
            case "state-restored" | "world-joined" if self._meanwhile is Activity.STARTUP:
                self._fill(record.at_s - record.number("duration_s"))
                self._add(Activity.STATE_TRANSFER, record.at_s)
            case "run-closed":
                is_clean = record.data.get("clean") is True
                self.lane.then = Activity.SHUTDOWN if is_clean else Activity.ABORT
            case _:
                pass  # `recovered` summarizes the events of a recovery

    def end(self, at_s: float) -> None:
        """End the lane. A killed process took steps that it did not record: all ranks step
        together, so its time is divided like the world's.
        """
        self._flush()
        is_killed = self._meanwhile is Activity.UNREPORTED and at_s > self._cursor_s
        shares = self._facts.shares_of(self._generation or 0) if is_killed else {}
        if shares:
            length_s = at_s - self._cursor_s
            seconds = {activity: part * length_s for activity, part in shares.items()}
            is_discarded = seconds.get(Activity.RECOMPUTED, 0.0) > 0
            self.lane.stretches.append(
                Stretch(self._cursor_s, at_s, seconds, self._generation if is_discarded else None)
            )
            self._cursor_s = at_s
        self._fill(at_s)

    def _fill(self, until_s: float) -> None:
        self._add(self._meanwhile, until_s)

    def _add(self, activity: Activity, until_s: float) -> None:
        if until_s > self._cursor_s:
            self.lane.stretches.append(Stretch.of(activity, self._cursor_s, until_s))
            self._cursor_s = until_s

    def _window(self, window: Window, end_s: float) -> None:
        if self._meanwhile is not Activity.UNREPORTED:  # else windows follow each other
            self._fill(end_s - window.duration_s)
        self._generation = window.generation
        start_s = self._cursor_s
        if end_s <= start_s:
            return
        is_first = window.ended == "first-step"
        steps_end_s = end_s - min(end_s - start_s, max(0.0, window.open_s))
        if steps_end_s > start_s:
            self.lane.stretches.append(self._steps(window, start_s, steps_end_s, end_s))
            if not is_first and window.steps:
                self._progress(start_s, steps_end_s)
            elif is_first:
                self.lane.progress.append((steps_end_s, steps_end_s))
        self._cursor_s = max(start_s, steps_end_s)
        self._open(window, end_s)

    def _sum_up(self, window: Window, end_s: float) -> bool:
        """Add a window of complete, kept steps to the sum; False if it is not one.

        There may be a million windows: later stages process one stretch for many of them.
        """
        total = self._sum
        if window.ended != "due" or window.open_s:
            return False
        if total is not None and end_s - total.start_s > MERGED_WINDOWS_S:
            self._flush()
            total = None
        generation = window.generation
        if total is None:
            is_next = self._meanwhile is Activity.UNREPORTED and generation == self._generation
            if not is_next or not window.steps:
                return False
            cut = self._facts.cuts.get(generation or 0)
            stragglers = self._facts.stragglers.get(generation or 0, ())
            total = self._sum = _WindowSum(self._cursor_s, cut, stragglers)
        is_more = generation == self._generation and end_s > total.end_s
        if not is_more or (total.cut is not None and (window.step or 0) > total.cut):
            return False
        total.add(window, end_s)
        return True

    def _flush(self) -> None:
        """Turn the summed windows into a stretch."""
        total, self._sum = self._sum, None
        if total is None or total.end_s <= total.start_s:
            return
        self.lane.stretches.append(_scaled(total.start_s, total.end_s, total.seconds))
        self._progress(total.start_s, total.end_s)
        self._cursor_s = total.end_s

    def _progress(self, start_s: float, end_s: float) -> None:
        """Record a span of complete steps."""
        progress = self.lane.progress
        if progress and progress[-1][1] == start_s:
            progress[-1] = (progress[-1][0], end_s)
        else:
            progress.append((start_s, end_s))

    def _steps(self, window: Window, start_s: float, end_s: float, window_end_s: float) -> Stretch:
        """The part of a window with complete steps, scaled to its length."""
        generation = window.generation or 0
        discarded = discarded_part(window, self._facts.cuts.get(generation))
        is_first = window.ended == "first-step"
        stragglers = () if is_first else self._facts.stragglers.get(generation, ())
        parts = parts_of(window, discarded, held_up_s(stragglers, window, window_end_s))
        if is_first:
            usual_s = self._facts.usual_of(generation)
            whole_s = max(0.0, window.productive_s) + parts[Activity.DATA]
            if usual_s is not None and whole_s > usual_s:
                parts[Activity.DATA] = 0.0
                parts[Activity.FIRST_STEP] = whole_s - usual_s
                parts[Activity.RECOMPUTED] = usual_s * discarded
                parts[Activity.PRODUCTIVE] = usual_s * (1 - discarded)
        return _scaled(start_s, end_s, parts, generation if discarded else None)

    def _open(self, window: Window, end_s: float) -> None:
        """The part of a window after the last commit: an interrupted step."""
        if window.ended == "fault":
            self._add(Activity.DETECTION, end_s)
            self._meanwhile = Activity.ABORT
        elif window.ended == "change":
            self._add(Activity.RENDEZVOUS, end_s)
            self._meanwhile = Activity.RENDEZVOUS
        elif window.ended == "close":
            self._add(Activity.SHUTDOWN, end_s)
            self._meanwhile = Activity.SHUTDOWN
        else:
            self._add(Activity.PRODUCTIVE, end_s)
            self._meanwhile = Activity.UNREPORTED

    def _laps(self, record: JournalRecord) -> None:
        """Add a recovery's measured phases, approximately in their order."""
        self._fill(record.at_s - record.number("duration_s"))
        laps = [(max(0.0, record.number(name)), activity) for name, activity in LAPS]
        whole_s = sum(took_s for took_s, _ in laps)
        left_s = record.at_s - self._cursor_s
        if whole_s > 0:
            for took_s, activity in laps:
                self._add(activity, self._cursor_s + left_s * took_s / whole_s)
        self._add(Activity.REBUILD, record.at_s)
        self._meanwhile = Activity.FIRST_STEP


# Agents ------------------------------------------------------------------------------------------


def agent_lane(
    writer: JournalWriter, workers: Sequence[Lane], *, next_start_s: float
) -> Lane | None:
    """The node's activity while it has no worker; ``workers`` are its workers' lanes.

    An agent that was killed lived at least as long as the workers that it had started.
    ``next_start_s`` is when the node's next agent begins.
    """
    lane, cursor_s, meanwhile = Lane(writer.node), writer.records[0].at_s, Activity.STARTUP
    since_s, had_worlds = cursor_s, False
    for record in writer.records:
        if record.at_s > cursor_s:
            lane.stretches += _agent_stretches(meanwhile, since_s, cursor_s, record.at_s, workers)
            cursor_s = record.at_s
        match record.name:
            case "node-arrived":
                is_new = not had_worlds and not record.whole("after_generation")
                meanwhile = Activity.WAITING_FOR_NODES if is_new else Activity.RENDEZVOUS
            case "world-entered":
                had_worlds = True
                meanwhile = Activity.UNREPORTED
            case "workers-starting":
                meanwhile = Activity.STARTUP
            case "worker-died":
                meanwhile = Activity.ABORT
            case "node-leaving" | "job-ended":
                meanwhile = Activity.SHUTDOWN
            case "node-parked":
                break
            case _:
                continue
        since_s = cursor_s
    else:
        own = (w.end_s for w in workers if lane_start(writer) <= w.start_s < next_start_s)
        alive_s = min(next_start_s, max(own, default=cursor_s))
        if alive_s > cursor_s:
            lane.stretches += _agent_stretches(meanwhile, since_s, cursor_s, alive_s, workers)
    return lane if lane.stretches else None


def lane_start(writer: JournalWriter) -> float:
    """When a process wrote its first line."""
    return writer.records[0].at_s


def _agent_stretches(
    meanwhile: Activity, since_s: float, start_s: float, end_s: float, workers: Sequence[Lane]
) -> list[Stretch]:
    """The activity in a world while its workers record nothing: they are starting, or have ended.

    ``since_s``: when ``meanwhile`` began, no later than ``start_s``.
    """
    if meanwhile not in (Activity.UNREPORTED, Activity.STARTUP):
        return [Stretch.of(meanwhile, start_s, end_s)]
    marks = [lane for lane in workers if lane.end_s > since_s and lane.start_s < end_s]
    if not marks:
        return [Stretch.of(meanwhile, start_s, end_s)]
    last = max(marks, key=lambda lane: lane.end_s)
    hung_s = last.end_s + UNREPORTED_S if last.then is None else last.end_s
    started_s = min(max(start_s, min(lane.start_s for lane in marks)), end_s)
    ended_s = min(max(started_s, hung_s), end_s)
    spans = (
        (Activity.STARTUP, start_s, started_s),
        (Activity.UNREPORTED, started_s, ended_s),
        (last.then or Activity.DETECTION, ended_s, end_s),
    )
    return [Stretch.of(activity, a, b) for activity, a, b in spans if b > a]


# ----------------------------------------------------------------------------
# Goodput: how much of a run's time made progress, and where the rest went.
#
# A pure function of the journal: :func:`goodput_of_run`. A node's time is the average over its
# workers or, while it has none, its agent's. A run's time is the average over the nodes that are
# present, so it adds up to the wall time from the first line to the last. The parts are
# :class:`Activity`.

PLANNED_CAUSES = frozenset({"first", "joined", "resumed"})
"""Causes of changes of the world in which nothing broke."""

# More than the rounding error of Unix times. The end of a world's first step is an instant, and
# an empty span would be ignored.
_ROUNDING = 1e-6  # seconds


@dataclass(frozen=True)
class NodeGoodput:
    """One node, over the time in which it was running."""

    node: str
    start_s: float
    end_s: float
    breakdown: Breakdown
    workers: tuple[Lane, ...] = ()  # one for each process
    agents: tuple[Lane, ...] = ()  # they count only while the node has no worker


@dataclass(frozen=True)
class IncidentGoodput:
    """A change of the world, from the last step before it to the first after it, and its cost."""

    generations: tuple[int, ...]  # the worlds that were formed in it
    cause: str
    reason: str
    start_s: float
    end_s: float
    nodes: tuple[str, ...]  # the nodes that were idle
    pause: Breakdown  # losses of the node that made no progress for longest
    breakdown: Breakdown  # losses only: seconds of the run's time
    is_over: bool = True  # False: no step was committed since, and the run has not ended

    @property
    def pause_s(self) -> float:
        """How long training made no progress: the time between the last commit before the incident
        and the first one after it, without the usual time of a step."""
        return self.pause.total_s


@dataclass(frozen=True)
class Goodput:
    """The goodput of one run."""

    run_id: str
    start_s: float
    end_s: float
    breakdown: Breakdown
    nodes: tuple[NodeGoodput, ...]
    incidents: tuple[IncidentGoodput, ...]
    steps: int  # committed, and part of the final weights
    recomputed_steps: int
    notes: tuple[str, ...]

    @property
    def duration_s(self) -> float:
        """Wall time, from the first line to the last."""
        return self.end_s - self.start_s


def goodput_of_run(run: RunJournal) -> Goodput:
    """Attribute all wall time of a run."""
    chosen, writers, notes = run.run_id, run.writers, run.notes
    records = [record for writer in writers for record in writer.records]
    facts = step_history(records)
    nodes = _nodes(writers, facts)
    if not nodes:
        return Goodput(chosen, 0.0, 0.0, Breakdown({}), (), (), 0, 0, notes)
    start_s = min(node.spans[0][0] for node in nodes)
    end_s = max(node.spans[-1][1] for node in nodes)
    present = counts(span for node in nodes for span in node.spans)
    for node in nodes:
        node.weigh(present)
    seconds = _sum(node.run_seconds for node in nodes)
    absent_s = sum(b - a for a, b in between(union(s for node in nodes for s in node.spans)))
    if absent_s > 0:
        seconds[Activity.NO_NODES] = absent_s
    return Goodput(
        run_id=chosen,
        start_s=start_s,
        end_s=end_s,
        breakdown=Breakdown(seconds),
        nodes=tuple(
            NodeGoodput(
                node=n.name,
                start_s=n.spans[0][0],
                end_s=n.spans[-1][1],
                breakdown=Breakdown(n.seconds),
                workers=tuple(n.workers),
                agents=tuple(n.agents),
            )
            for n in nodes
        ),
        incidents=tuple(_incidents(nodes, records, facts.newest)),
        steps=max(0, facts.last_step - facts.first_step),
        recomputed_steps=facts.recomputed_steps,
        notes=notes,
    )


# Nodes -------------------------------------------------------------------------------------------


@dataclass
class _NodeTime:
    name: str
    workers: list[Lane]
    agents: list[Lane]
    spans: list[tuple[float, float]] = field(default_factory=list)
    seconds: dict[Activity, float] = field(default_factory=dict)  # of the node's own time
    run_seconds: dict[Activity, float] = field(default_factory=dict)  # of the run's
    discarded: dict[int, float] = field(default_factory=dict)  # of the run's, by generation
    # Of each lane: its share of the node's time, and of the run's.
    _weights: list[tuple[Lane, Weight, Weight]] = field(default_factory=list)

    def weigh(self, present: Sequence[tuple[float, int]]) -> None:
        """Sum the share of each lane. ``present``: the number of nodes over time."""
        of_workers = counts((lane.start_s, lane.end_s) for lane in self.workers)
        of_agents = counts((lane.start_s, lane.end_s) for lane in self.agents)
        ones: Sequence[tuple[float, int]] = ((float("-inf"), 1),)
        for lanes, alive, hidden in (
            (self.workers, of_workers, ()),
            (self.agents, of_agents, of_workers),
        ):
            own, run = _shares(alive, hidden, ones), _shares(alive, hidden, present)
            for lane in lanes:
                self._weights.append((lane, own, run))
                self._add(lane, own, run)

    def _add(self, lane: Lane, own: Weight, run: Weight) -> None:
        for stretch in lane.stretches:
            in_node = own.mean(stretch.start_s, stretch.end_s)
            in_run = run.mean(stretch.start_s, stretch.end_s)
            for activity, took_s in stretch.seconds.items():
                self.seconds[activity] = self.seconds.get(activity, 0.0) + took_s * in_node
                self.run_seconds[activity] = self.run_seconds.get(activity, 0.0) + took_s * in_run
            if stretch.discarded_in is not None:
                lost_s = stretch.seconds.get(Activity.RECOMPUTED, 0.0) * in_run
                before_s = self.discarded.get(stretch.discarded_in, 0.0)
                self.discarded[stretch.discarded_in] = before_s + lost_s

    def interruptions(self) -> list[Interruption]:
        """The gaps in which no worker made progress, between two that did."""
        made = union((a, max(b, a + _ROUNDING)) for lane in self.workers for a, b in lane.progress)
        return [Interruption(a, b) for a, b in between(made)]

    def open_interruption(self) -> Interruption | None:
        """From the workers' last progress to the node's last line; None without progress."""
        made_s = max((b for lane in self.workers for _, b in lane.progress), default=inf)
        end_s = self.spans[-1][1]
        return Interruption(made_s, end_s) if made_s < end_s else None

    def losses(self, span: Interruption, *, of_run: bool) -> dict[Activity, float]:
        """Seconds of the run's or of the node's own time, within an interruption."""
        lost: dict[Activity, float] = defaultdict(float)
        for lane, own, run in self._weights:
            weight = run if of_run else own
            first = bisect_right(lane.stretches, span.start_s, key=lambda s: s.end_s)
            for stretch in lane.stretches[first:]:
                if stretch.start_s >= span.end_s:
                    break
                start_s, end_s = max(stretch.start_s, span.start_s), min(stretch.end_s, span.end_s)
                part = (end_s - start_s) / (stretch.end_s - stretch.start_s)
                share = part * weight.mean(start_s, end_s)
                for activity, took_s in stretch.seconds.items():
                    if activity.is_loss and stretch.discarded_in is None:
                        lost[activity] += took_s * share
        return lost


def _nodes(writers: Sequence[JournalWriter], facts: StepHistory) -> list[_NodeTime]:
    by_name: dict[str, list[JournalWriter]] = defaultdict(list)
    for writer in writers:
        by_name[writer.node].append(writer)
    nodes = []
    for name, of_node in sorted(by_name.items()):
        workers = [lane for w in of_node if w.role == "worker" if (lane := worker_lane(w, facts))]
        agents = _agent_lanes([w for w in of_node if w.role != "worker"], workers)
        spans = union((lane.start_s, lane.end_s) for lane in (*workers, *agents))
        if spans:
            nodes.append(_NodeTime(name, workers, agents, spans))
    return nodes


def _agent_lanes(writers: Sequence[JournalWriter], workers: Sequence[Lane]) -> list[Lane]:
    ordered = sorted(writers, key=lane_start)
    starts = [*map(lane_start, ordered[1:]), float("inf")]
    lanes = (agent_lane(w, workers, next_start_s=s) for w, s in zip(ordered, starts, strict=False))
    return [lane for lane in lanes if lane is not None]


def _shares(
    alive: Sequence[tuple[float, int]],
    hidden: Sequence[tuple[float, int]],
    present: Sequence[tuple[float, int]],
) -> Weight:
    """The weight of one of the lanes ``alive``: 0 while there is one of ``hidden``."""
    times = sorted({t for counted in (alive, hidden, present) for t, _ in counted if isfinite(t)})
    breaks = []
    for time_s in times:
        lanes, others, nodes = (_at(counted, time_s) for counted in (alive, hidden, present))
        value = 1.0 / (lanes * nodes) if lanes and nodes and not others else 0.0
        breaks.append((time_s, value))
    return Weight(breaks)


def _at(counted: Sequence[tuple[float, int]], time_s: float) -> int:
    place = bisect_right(counted, time_s, key=lambda pair: pair[0]) - 1
    return counted[place][1] if place >= 0 else 0


def _sum(parts: Iterable[Mapping[Activity, float]]) -> dict[Activity, float]:
    seconds: dict[Activity, float] = defaultdict(float)
    for part in parts:
        for activity, took_s in part.items():
            seconds[activity] += took_s
    return dict(seconds)


# Incidents ---------------------------------------------------------------------------------------


def _pauses_of_training(
    nodes: Sequence[_NodeTime], open_stops: Sequence[tuple[_NodeTime, Interruption]]
) -> list[tuple[float, float]]:
    """The times in which no node made progress, between two in which one did, and since the last
    if an incident is not over."""
    made = union(
        (a, max(b, a + _ROUNDING))
        for node in nodes
        for lane in node.workers
        for a, b in lane.progress
    )
    pauses = list(between(made))
    if open_stops:
        pauses.append((made[-1][1], max(stop.end_s for _, stop in open_stops)))
    return pauses


def _within(stop: Interruption, start_s: float, end_s: float) -> Interruption:
    return Interruption(max(stop.start_s, start_s), min(stop.end_s, end_s))


def _standstills(
    times: Sequence[tuple[float, float]], formed: Iterable[JournalRecord]
) -> list[tuple[tuple[float, float], list[JournalRecord]]]:
    """The times in which worlds began, each with its worlds. The world of a joining node is formed
    while the other nodes still train; they become idle afterwards."""
    worlds: dict[int, list[JournalRecord]] = {}
    for record in formed:
        place = bisect_left(times, record.at_s, key=lambda span: span[1])
        if place < len(times):
            worlds.setdefault(place, []).append(record)
    return [(times[place], of_stop) for place, of_stop in sorted(worlds.items())]


def _reason(worlds: Sequence[JournalRecord]) -> str:
    """Why training was interrupted, and events until all nodes continued."""
    ends = [r for r in worlds if r is worlds[0] or r.text("cause") not in ("joined", "resumed")]
    return "; then ".join(dict.fromkeys(r.text("reason") for r in ends))


def _open_stops(
    nodes: Sequence[_NodeTime], changes: Sequence[JournalRecord], newest: int
) -> list[tuple[_NodeTime, Interruption]]:
    """The interruptions of an incident that is not over: a world was formed because something
    broke, and is younger than the ``newest`` with steps. None once the job has ended, or all nodes
    have left it."""
    is_ended = any(record.name == "job-ended" for record in changes) or have_left(changes)
    broken_s = min(
        (
            record.at_s
            for record in changes
            if record.name == "world-formed"
            and (record.whole("generation") or 0) > newest
            and record.text("cause") not in PLANNED_CAUSES
        ),
        default=inf,
    )
    if is_ended or not newest:
        return []
    stops = [(node, stop) for node in nodes if (stop := node.open_interruption())]
    return [(node, stop) for node, stop in stops if stop.end_s > broken_s]


def have_left(records: Iterable[JournalRecord]) -> bool:
    """Whether all nodes have left the job: its newest world is empty, and they announced it, as
    after ``elastic stop``, a preemption or Ctrl-C."""
    formed, are_leaving = [], False
    for record in records:
        if record.name == "world-formed":
            formed.append(record)
        are_leaving = are_leaving or record.name == "node-leaving"
    newest = max(formed, key=lambda r: r.whole("generation") or 0, default=None)
    return are_leaving and newest is not None and newest.whole("size") == 0


def _longest_pause(stopped: Sequence[tuple[_NodeTime, Interruption]]) -> Breakdown:
    """The losses of the node that lost most, over all its interruptions in an incident."""
    by_node: dict[str, list[dict[Activity, float]]] = defaultdict(list)
    for node, stop in stopped:
        by_node[node.name].append(node.losses(stop, of_run=False))
    pauses = (Breakdown({a: s for a, s in _sum(p).items() if s > 0}) for p in by_node.values())
    return max(pauses, key=lambda pause: pause.total_s, default=Breakdown({}))


def _incidents(
    nodes: Sequence[_NodeTime], records: Iterable[JournalRecord], newest: int
) -> Iterable[IncidentGoodput]:
    """One incident per interruption in which worlds were formed, with all interrupted nodes.

    ``newest``: the newest generation with steps.
    """
    changes = [r for r in records if r.name in ("world-formed", "job-ended", "node-leaving")]
    formed = sorted((r for r in changes if r.name == "world-formed"), key=lambda r: r.at_s)
    open_stops = _open_stops(nodes, changes, newest)
    open_s = min((stop.start_s for _, stop in open_stops), default=inf)
    stops = [(node, stop) for node in nodes for stop in node.interruptions()] + open_stops
    times = _pauses_of_training(nodes, open_stops)
    began_s = min(
        (lane.progress[0][0] for n in nodes for lane in n.workers if lane.progress), default=0.0
    )
    counted: set[int] = set()
    ended_s = -inf
    for (start_s, end_s), worlds in _standstills(times, [r for r in formed if r.at_s >= began_s]):
        # A node that restarts its workers is idle for longer than the others: its time is part of
        # the incident's cost, but training continues without it.
        stopped = [(n, s) for n, s in stops if ended_s <= s.start_s < end_s and s.end_s > start_s]
        ended_s = end_s
        paused = [(n, _within(s, start_s, end_s)) for n, s in stopped]
        seconds = _sum(node.losses(stop, of_run=True) for node, stop in stopped)
        first = worlds[0].whole("generation") or 0
        for node in nodes:
            for generation, lost_s in node.discarded.items():
                if generation < first and generation not in counted:
                    recomputed_s = seconds.get(Activity.RECOMPUTED, 0.0)
                    seconds[Activity.RECOMPUTED] = recomputed_s + lost_s
        counted.update(g for node in nodes for g in node.discarded if g < first)
        yield IncidentGoodput(
            generations=tuple(r.whole("generation") or 0 for r in worlds),
            cause=worlds[0].text("cause"),
            reason=_reason(worlds),
            start_s=start_s,
            end_s=end_s,
            nodes=tuple(sorted({node.name for node, _ in stopped})),
            pause=_longest_pause(paused),
            breakdown=Breakdown({a: s for a, s in seconds.items() if s > 0}),
            is_over=end_s <= open_s,
        )
