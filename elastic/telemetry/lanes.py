"""What each process did from its first line to its last: one lane of stretches per process.

A worker's lane is made of the windows that it summed up (``step-times``) and of what it says of
its recoveries. An agent's lane says what a node did while it had no worker.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elastic.telemetry.activities import Activity, Lane, Stretch
from elastic.telemetry.journal_reader import JournalRecord
from elastic.telemetry.merging import JournalWriter
from elastic.tuning.worker_intervals import UNREPORTED_S

_PARTS = (
    ("data_s", Activity.DATA),
    ("checkpoint_s", Activity.CHECKPOINT),
    ("evaluation_s", Activity.EVALUATION),
)
_LAPS = (
    ("leave_s", Activity.ABORT),
    ("wait_s", Activity.RENDEZVOUS),
    ("paused_s", Activity.WAITING_FOR_NODES),
    ("build_s", Activity.REBUILD),
    ("agree_s", Activity.STATE_TRANSFER),
    ("wrap_s", Activity.REBUILD),
)


@dataclass(frozen=True)
class StepHistory:
    """What the windows of all ranks tell together."""

    usual_s: Mapping[int, float]  # by generation: productive time of a step, less the first
    shares: Mapping[int, Mapping[Activity, float]]  # by generation: what windows hold, of 1
    cuts: Mapping[int, int]  # by generation: the step from which on a later one redid its work
    first_step: int
    last_step: int
    recomputed_steps: int

    def usual_of(self, generation: int) -> float | None:
        """Of the generation, else of the nearest one that tells."""
        if not self.usual_s:
            return None
        return self.usual_s[min(self.usual_s, key=lambda g: abs(g - generation))]


def step_history(records: Iterable[JournalRecord]) -> StepHistory:
    """From the windows of all ranks of a run."""
    times: dict[int, float] = defaultdict(float)
    steps: dict[int, int] = defaultdict(int)
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    windows: list[JournalRecord] = []
    for record in records:
        generation, step = record.whole("generation"), record.whole("step")
        if generation is None or step is None:
            continue
        if record.name == "world-joined":
            begins[generation] = min(step, begins.get(generation, step))
        elif record.name == "step-times":
            made = max(0, record.whole("steps") or 0)
            begins[generation] = min(step - made, begins.get(generation, step - made))
            ends[generation] = max(step, ends.get(generation, step))
            if made and record.text("ended") != "first-step":
                windows.append(record)
                times[generation] += record.number("productive_s")
                steps[generation] += made
    cuts = _cuts(begins)
    return StepHistory(
        usual_s={g: times[g] / steps[g] for g in times},
        shares=_shares(windows, cuts),
        cuts=cuts,
        first_step=min(begins.values(), default=0),
        last_step=max(ends.values(), default=0),
        recomputed_steps=sum(max(0, ends[g] - cuts[g]) for g in ends if g in cuts),
    )


def _shares(
    windows: Iterable[JournalRecord], cuts: Mapping[int, int]
) -> dict[int, dict[Activity, float]]:
    sums: dict[int, dict[Activity, float]] = defaultdict(lambda: defaultdict(float))
    for record in windows:
        generation = record.whole("generation") or 0
        of_generation = sums[generation]
        for activity, took_s in _parts(record, _discarded(record, cuts.get(generation))).items():
            of_generation[activity] += took_s
    return {
        generation: {activity: took_s / whole_s for activity, took_s in parts.items()}
        for generation, parts in sums.items()
        if (whole_s := sum(parts.values())) > 0
    }


def _parts(record: JournalRecord, discarded: float) -> dict[Activity, float]:
    """Of a window, in seconds, but for the step that had not ended."""
    parts = {activity: max(0.0, record.number(name)) for name, activity in _PARTS}
    productive_s = max(0.0, record.number("productive_s"))
    parts[Activity.RECOMPUTED] = productive_s * discarded
    parts[Activity.PRODUCTIVE] = productive_s * (1 - discarded)
    return parts


def _discarded(record: JournalRecord, cut: int | None) -> float:
    """Which part of the window's steps a later generation, from step ``cut`` on, did again."""
    steps = record.whole("steps") or 0
    if cut is None or steps <= 0:
        return 0.0
    last = record.whole("step") or 0
    return min(1.0, max(0, last - max(cut, last - steps)) / steps)


def _cuts(begins: Mapping[int, int]) -> dict[int, int]:
    cuts: dict[int, int] = {}
    lowest: int | None = None
    for generation in sorted(begins, reverse=True):
        if lowest is not None:
            cuts[generation] = lowest
        lowest = begins[generation] if lowest is None else min(lowest, begins[generation])
    return cuts


# Workers -----------------------------------------------------------------------------------------


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
        self._meanwhile = Activity.STARTUP  # what no event accounts for
        self._generation: int | None = None  # of the last window

    def take(self, record: JournalRecord) -> None:
        match record.name:
            case "step-times":
                self._window(record)
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
                pass  # a recovery sums up what happens in it when it is over

    def end(self, at_s: float) -> None:
        """The process wrote its last line. If it was killed, it had made steps until then that it
        has not summed up: all ranks step together, so they are shared out as those of the world.
        """
        shares = self._facts.shares.get(self._generation or 0)
        if self._meanwhile is Activity.UNREPORTED and shares and at_s > self._cursor_s:
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

    def _window(self, record: JournalRecord) -> None:
        if self._meanwhile is not Activity.UNREPORTED:  # else windows follow each other
            self._fill(record.at_s - record.number("duration_s"))
        self._generation = record.whole("generation")
        start_s, end_s = self._cursor_s, record.at_s
        if end_s <= start_s:
            return
        open_s = min(end_s - start_s, max(0.0, record.number("open_s")))
        ended, is_first = record.text("ended"), record.text("ended") == "first-step"
        steps_end_s = end_s - open_s
        if steps_end_s > start_s:
            self.lane.stretches.append(self._steps(record, start_s, steps_end_s))
            if not is_first and record.whole("steps"):
                self.lane.progress.append((start_s, steps_end_s))
            elif is_first:
                self.lane.progress.append((steps_end_s, steps_end_s))
        self._cursor_s = max(start_s, steps_end_s)
        self._open(record, ended, end_s)

    def _steps(self, record: JournalRecord, start_s: float, end_s: float) -> Stretch:
        """The part of a window that holds whole steps, scaled to its length."""
        generation = record.whole("generation") or 0
        discarded = _discarded(record, self._facts.cuts.get(generation))
        parts = _parts(record, discarded)
        if record.text("ended") == "first-step":
            usual_s = self._facts.usual_of(generation)
            whole_s = max(0.0, record.number("productive_s")) + parts[Activity.DATA]
            if usual_s is not None and whole_s > usual_s:
                parts[Activity.DATA] = 0.0
                parts[Activity.FIRST_STEP] = whole_s - usual_s
                parts[Activity.RECOMPUTED] = usual_s * discarded
                parts[Activity.PRODUCTIVE] = usual_s * (1 - discarded)
        scale = sum(parts.values()) / (end_s - start_s)
        if scale <= 0:
            parts, scale = {Activity.PRODUCTIVE: end_s - start_s}, 1.0
        seconds = {activity: took_s / scale for activity, took_s in parts.items() if took_s > 0}
        return Stretch(start_s, end_s, seconds, generation if discarded else None)

    def _open(self, record: JournalRecord, ended: str, end_s: float) -> None:
        """What a window holds after the last commit: a step that did not end."""
        if ended == "fault":
            usual_s = self._facts.usual_of(record.whole("generation") or 0) or 0.0
            self._add(Activity.RECOMPUTED, min(end_s, self._cursor_s + usual_s))
            self._add(Activity.DETECTION, end_s)
            self._meanwhile = Activity.ABORT
        elif ended == "change":
            self._add(Activity.RENDEZVOUS, end_s)
            self._meanwhile = Activity.RENDEZVOUS
        elif ended == "close":
            self._add(Activity.SHUTDOWN, end_s)
            self._meanwhile = Activity.SHUTDOWN
        else:
            self._add(Activity.PRODUCTIVE, end_s)
            self._meanwhile = Activity.UNREPORTED

    def _laps(self, record: JournalRecord) -> None:
        """A recovery, whose laps are known, in about their order."""
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
    """What the node does while it has no worker; ``workers`` are its workers' lanes.

    An agent that was killed lived at least as long as the workers that it had started.
    ``next_start_s`` is when the node's next agent begins.
    """
    lane, cursor_s, meanwhile = Lane(writer.node), writer.records[0].at_s, Activity.STARTUP
    had_worlds = False
    for record in writer.records:
        if record.at_s > cursor_s:
            lane.stretches += _agent_stretches(meanwhile, cursor_s, record.at_s, workers)
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
                pass
    else:
        own = (w.end_s for w in workers if lane_start(writer) <= w.start_s < next_start_s)
        alive_s = min(next_start_s, max(own, default=cursor_s))
        if alive_s > cursor_s:
            lane.stretches += _agent_stretches(meanwhile, cursor_s, alive_s, workers)
    return lane if lane.stretches else None


def lane_start(writer: JournalWriter) -> float:
    """When a process wrote its first line."""
    return writer.records[0].at_s


def _agent_stretches(
    meanwhile: Activity, start_s: float, end_s: float, workers: Sequence[Lane]
) -> list[Stretch]:
    """While the node is in a world, what its workers did not write down: they start, or died."""
    if meanwhile not in (Activity.UNREPORTED, Activity.STARTUP):
        return [Stretch.of(meanwhile, start_s, end_s)]
    marks = [lane for lane in workers if lane.end_s > start_s and lane.start_s < end_s]
    if not marks:
        return [Stretch.of(meanwhile, start_s, end_s)]
    started_s = min(max(start_s, min(lane.start_s for lane in marks)), end_s)
    ended_s = max(started_s, min(end_s, max(lane.end_s for lane in marks)))
    then = max(marks, key=lambda lane: lane.end_s).then
    hung_s = min(end_s, ended_s + UNREPORTED_S) if then is None else ended_s
    spans = (
        (Activity.STARTUP, start_s, started_s),
        (Activity.UNREPORTED, started_s, hung_s),
        (then or Activity.DETECTION, hung_s, end_s),
    )
    return [Stretch.of(activity, a, b) for activity, a, b in spans if b > a]
