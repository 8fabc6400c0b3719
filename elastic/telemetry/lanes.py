"""The activities of each process from its first line to its last: one lane of stretches each.

A worker's lane consists of its summed windows (``rank-times``) and the events of
its recoveries. An agent's lane covers the time in which a node had no worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastic.telemetry.activities import Activity, Lane, Stretch
from elastic.telemetry.journal_reader import JournalRecord, Window
from elastic.telemetry.merging import JournalWriter
from elastic.telemetry.step_history import (
    StepHistory,
    discarded_part,
    parts_of,
)
from elastic.telemetry.straggling import Straggling, held_up_s
from elastic.tuning.worker_intervals import MERGED_WINDOWS_S, UNREPORTED_S

_LAPS = (
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
            usual_s = self._facts.usual_of(window.generation or 0) or 0.0
            self._add(Activity.RECOMPUTED, min(end_s, self._cursor_s + usual_s))
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
        laps = [(max(0.0, record.number(name)), activity) for name, activity in _LAPS]
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
