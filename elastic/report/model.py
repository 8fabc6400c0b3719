"""The report of a job as data: incidents, curves, checkpoints, and findings."""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from elastic.membership.failures import is_consequence
from elastic.telemetry.goodput import (
    PLANNED_CAUSES,
    Activity,
    Goodput,
    IncidentGoodput,
    Lane,
    NodeGoodput,
    goodput_of_run,
    have_left,
)
from elastic.telemetry.log import counted, duration, printable
from elastic.telemetry.reader import JournalRecord, MergedJournal, run_of
from elastic.tracebacks import exception_line

# ----------------------------------------------------------------------------
# Curves of values logged by the script, with as many points as a chart needs. Pure.
#
# If a recovery repeats steps, their earlier values are dropped. A curve that is too long is
# divided into pieces; the lowest and highest value of each remain, so that spikes stay visible.

METRICS = "metrics"  # the event that holds them: fields step and values
MAX_CURVES = 4
MAX_POINTS = 600


@dataclass(frozen=True)
class Curve:
    """One quantity over steps, ascending."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    points: int  # before thinning
    last: float
    lowest: float
    highest: float
    invalid: int = 0  # number of values that were not finite


def curves_of(
    records: Iterable[JournalRecord],
    *,
    most_curves: int = MAX_CURVES,
    most_points: int = MAX_POINTS,
) -> list[Curve]:
    """The curves from ``metrics`` events in order of time. A loss comes first."""
    found: dict[str, list[tuple[int, float]]] = defaultdict(list)
    newest = -1
    for record in records:
        if record.name != METRICS:
            continue
        step, values = record.whole("step"), record.data.get("values")
        if step is None or not isinstance(values, dict):
            continue
        if step < newest:
            _discard_from(found.values(), step)
        newest = step
        for name, value in values.items():
            points = found[str(name)]
            if points and points[-1][0] == step:
                points.pop()
            points.append((step, _number(value)))
    names = sorted(found, key=_rank)[:most_curves]
    curves = (_curve(name, found[name], most_points) for name in names)
    return [curve for curve in curves if curve is not None]


def _discard_from(curves: Iterable[list[tuple[int, float]]], step: int) -> None:
    for points in curves:
        while points and points[-1][0] >= step:
            points.pop()


def _number(value: object) -> float:
    """A number, or NaN, which the journal writes as a string because JSON has none."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return math.nan


def _rank(name: str) -> tuple[bool, bool, str]:
    return name != "loss", "loss" not in name.lower(), name


def _curve(name: str, measured: Sequence[tuple[int, float]], most_points: int) -> Curve | None:
    points = [point for point in measured if math.isfinite(point[1])]
    if not points:
        return None
    values = [value for _, value in points]
    kept = thinned(points, most_points)
    return Curve(
        name=name,
        steps=tuple(step for step, _ in kept),
        values=tuple(value for _, value in kept),
        points=len(points),
        last=values[-1],
        lowest=min(values),
        highest=max(values),
        invalid=len(measured) - len(points),
    )


def thinned(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """About ``most`` points: the first, the last, and the extremes of pieces of equal length.

    >>> thinned([(0, 1.0), (1, 9.0), (2, 1.0), (3, 1.0), (4, 0.0), (5, 1.0)], 4)
    [(0, 1.0), (1, 9.0), (4, 0.0), (5, 1.0)]
    """
    if len(points) <= most:
        return list(points)
    pieces = max(1, (most - 2) // 2)
    inner = points[1:-1]
    kept = [points[0]]
    for piece in range(pieces):
        of_piece = inner[piece * len(inner) // pieces : (piece + 1) * len(inner) // pieces]
        if of_piece:
            low, high = min(of_piece, key=lambda p: p[1]), max(of_piece, key=lambda p: p[1])
            kept += sorted({low, high})
    return [*kept, points[-1]]


# ----------------------------------------------------------------------------
# The checkpoints of a run, from its journals: committed and skipped ones. Pure.


@dataclass(frozen=True)
class SavedCheckpoint:
    """A committed checkpoint."""

    name: str
    step: int
    at_s: float  # Unix time at which the first rank saw it committed
    duration_s: float  # of the slowest rank
    stall_s: float  # time that training waited, on the slowest rank
    size_bytes: int  # of all ranks that are known


@dataclass(frozen=True)
class FailedCheckpoint:
    """A checkpoint that could not be saved or used."""

    name: str
    at_s: float
    node: str
    reason: str


@dataclass(frozen=True)
class CheckpointHistory:
    """All checkpoints of a run, in order of time."""

    saved: tuple[SavedCheckpoint, ...]
    skipped: tuple[FailedCheckpoint, ...]

    def last_before(self, at_s: float) -> SavedCheckpoint | None:
        """The newest checkpoint committed by ``at_s``."""
        place = bisect_right(self.saved, at_s, key=lambda saved: saved.at_s)
        return self.saved[place - 1] if place else None

    @property
    def last(self) -> SavedCheckpoint | None:
        return self.saved[-1] if self.saved else None


def checkpoint_history(records: Iterable[JournalRecord]) -> CheckpointHistory:
    """The history from the events of all ranks, in any order."""
    parts: dict[tuple[str, int], list[JournalRecord]] = {}
    skipped: dict[tuple[str, str, str], FailedCheckpoint] = {}
    for record in records:
        if record.name == "checkpoint-saved":
            key = (record.text("name"), record.whole("step") or 0)
            parts.setdefault(key, []).append(record)
        elif record.name == "checkpoint-skipped":
            name, reason = record.text("name"), record.text("reason")
            skipped.setdefault(
                (name, record.node, reason),
                FailedCheckpoint(name, record.at_s, record.node, reason),
            )
    saved = [_saved(name, step, of_ranks) for (name, step), of_ranks in parts.items()]
    return CheckpointHistory(
        saved=tuple(sorted(saved, key=lambda c: c.at_s)),
        skipped=tuple(sorted(skipped.values(), key=lambda c: c.at_s)),
    )


def _saved(name: str, step: int, of_ranks: Sequence[JournalRecord]) -> SavedCheckpoint:
    return SavedCheckpoint(
        name=name,
        step=step,
        at_s=min(record.at_s for record in of_ranks),
        duration_s=max(record.number("duration_s") for record in of_ranks),
        stall_s=max(record.number("stall_s") for record in of_ranks),
        size_bytes=sum(max(0, record.whole("bytes") or 0) for record in of_ranks),
    )


# ----------------------------------------------------------------------------
# The interruptions of a run: each change of its world, its cost, and the steps at risk. Pure.

_MAX_ERRORS = 3  # of one incident


@dataclass(frozen=True)
class IncidentReport:
    """A change of the world, from the last step before it to the first after it."""

    generations: tuple[int, ...]  # the worlds that were formed during it
    cause: str  # of the first: lost, left, failure, joined, paused, resumed or takeover
    reason: str
    at_s: float  # Unix time at which the leader recorded it, as in ``elastic status``
    start_s: float  # the last commit before it
    end_s: float  # the first commit after it
    pause_s: float  # how long training made no progress: the node that lost most
    phases: tuple[tuple[Activity, float], ...]  # seconds of the pause, roughly in order
    recomputed_s: float  # of the run's time: committed steps that had to be repeated
    cost_s: float  # of the run's time: pauses of all nodes, and recomputed steps
    nodes: tuple[str, ...]  # the nodes that made no progress
    step: int | None  # committed when it began
    state_from: str  # the source of the state for workers that lacked it; "": all had it
    errors: tuple[tuple[str, str], ...]  # node and error, the first failure first
    checkpoint: SavedCheckpoint | None  # the last one committed when it began
    is_over: bool  # False: no step was committed since, and the run has not ended

    @property
    def is_failure(self) -> bool:
        """Whether something failed: a joining node interrupts training, too."""
        return self.cause not in PLANNED_CAUSES

    @property
    def checkpoint_age_s(self) -> float | None:
        """The age of the last checkpoint when the incident began; None without one."""
        return None if self.checkpoint is None else max(0.0, self.start_s - self.checkpoint.at_s)

    @property
    def steps_at_risk(self) -> int | None:
        """Steps that would have been lost if no survivor had the state; None: unknown."""
        if self.step is None:
            return None
        return max(0, self.step - (self.checkpoint.step if self.checkpoint is not None else 0))


_OF_WORKERS = frozenset(
    {"world-fault", "world-joined", "state-restored", "state-received", "worker-died"}
)
_OF_LEADERS = frozenset({"world-formed", "failure-judged", "node-lost"})


def incident_reports(
    incidents: Sequence[IncidentGoodput],
    records: Iterable[JournalRecord],
    checkpoints: CheckpointHistory,
) -> list[IncidentReport]:
    """One report per incident; ``records``: the run's records, in order of time."""
    relevant: list[JournalRecord] = []
    led: list[JournalRecord] = []  # few, even in a job of many ranks
    for record in records:
        if record.name in _OF_WORKERS:
            relevant.append(record)
        elif record.name in _OF_LEADERS:
            led.append(record)
    return [_report(incident, relevant, led, checkpoints) for incident in incidents]


def _report(
    incident: IncidentGoodput,
    relevant: Sequence[JournalRecord],
    led: Sequence[JournalRecord],
    checkpoints: CheckpointHistory,
) -> IncidentReport:
    first = bisect_left(relevant, incident.start_s, key=lambda r: r.at_s)
    within = relevant[first : bisect_right(relevant, incident.end_s, key=lambda r: r.at_s)]
    faults = [r for r in within if r.name == "world-fault"]
    steps = [s for r in faults if (s := r.whole("step")) is not None]
    steps = steps or [
        s for r in within if r.name == "world-joined" and (s := r.whole("step")) is not None
    ]
    seconds = incident.pause.seconds
    return IncidentReport(
        generations=incident.generations,
        cause=incident.cause,
        reason=incident.reason,
        at_s=_recorded_s(incident, led),
        start_s=incident.start_s,
        end_s=incident.end_s,
        pause_s=incident.pause_s,
        phases=tuple((a, seconds[a]) for a in Activity if seconds.get(a, 0.0) > 0),
        recomputed_s=incident.breakdown.seconds.get(Activity.RECOMPUTED, 0.0),
        cost_s=incident.breakdown.total_s,
        nodes=incident.nodes,
        step=max(steps, default=None),
        state_from=_state_from(within),
        errors=tuple(_errors([*_deaths_before(incident, relevant, led), *within])),
        checkpoint=checkpoints.last_before(incident.start_s),
        is_over=incident.is_over,
    )


def _deaths_before(
    incident: IncidentGoodput, relevant: Sequence[JournalRecord], led: Sequence[JournalRecord]
) -> list[JournalRecord]:
    """The deaths that ended the last world, although its other ranks trained on for a moment."""
    first = incident.generations[0]
    worlds = [r for r in led if r.name == "world-formed"]
    begun_s = max((r.at_s for r in worlds if r.whole("generation") == first - 1), default=math.inf)
    if begun_s > incident.start_s:
        return []
    since = bisect_left(relevant, begun_s, key=lambda r: r.at_s)
    until = bisect_left(relevant, incident.start_s, key=lambda r: r.at_s)
    died = (r for r in relevant[since:until] if r.name == "worker-died")
    return [r for r in died if r.whole("generation") == first - 1]


def _state_from(within: Sequence[JournalRecord]) -> str:
    received = {r.whole("source") for r in within if r.name == "state-received"}
    restored = {r.text("source") for r in within if r.name == "state-restored"}
    sources = [f"rank {rank}" for rank in sorted(r for r in received if r is not None)]
    sources += [
        "the initial state" if source == "initial" else f"checkpoint {source}"
        for source in sorted(restored)
        if source
    ]
    return ", ".join(sources)


def _recorded_s(incident: IncidentGoodput, records: Sequence[JournalRecord]) -> float:
    """When the leader noticed the failure or, without one, agreed on the first world after it: that
    may be seconds later, as it waits for other nodes."""
    formed = {r.whole("generation"): r.at_s for r in records if r.name == "world-formed"}
    first = incident.generations[0]
    first_s = formed.get(first, incident.start_s)
    before_s = max((at_s for at_s in formed.values() if at_s < first_s), default=-math.inf)
    noticed = (
        record.at_s
        for record in records
        if (record.name == "node-lost" and before_s < record.at_s < first_s)
        or (record.name == "failure-judged" and record.whole("generation") == first - 1)
    )
    return min(noticed, default=first_s)


_ABORTED = re.compile(r"(elastic\.errors\.)?GroupAborted\b")


def _errors(within: Sequence[JournalRecord]) -> list[tuple[str, str]]:
    """What workers raised, in order of time, and once for each node: its most detailed text.

    Errors that only say that a peer is gone, or that the group was aborted for that, are
    consequences: the incident's reason names the peer.
    """
    known: dict[str, str] = {}
    for record in within:
        if record.name not in ("worker-died", "world-fault"):
            continue
        text = record.text("reason") or record.text("traceback") or record.text("error")
        if text.strip() and not (_ABORTED.match(exception_line(text)) or is_consequence(text)):
            known[record.node] = max(known.get(record.node, ""), text, key=len)
    return list(known.items())[:_MAX_ERRORS]


# ----------------------------------------------------------------------------
# The timeline of a run: the activities of each node, in at most one segment per pixel. Pure.
#
# A column of the chart may cover much time: hours of steps, and within them a recovery of
# a second. So a column shows an interruption if it contains one, else the activity that took
# most of it. Consecutive columns with the same activity are one segment.

_USED = frozenset({"world-formed", "world-joined", "recovered"})
# Continuous activities: the largest share decides. All others are interruptions.
_USUAL = frozenset(
    {
        Activity.PRODUCTIVE,
        Activity.DATA,
        Activity.CHECKPOINT,
        Activity.STRAGGLING,
        Activity.EVALUATION,
        Activity.RECOMPUTED,
    }
)


@dataclass(frozen=True, slots=True)
class Segment:
    """A span of a node's time, shown as one activity."""

    start_s: float  # Unix time
    end_s: float
    activity: Activity


@dataclass(frozen=True)
class NodeLane:
    """One node's line of the chart: segments in order of time, with gaps while it was absent."""

    node: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class GenerationMark:
    """When a world was agreed, and why."""

    generation: int
    at_s: float  # Unix time
    cause: str  # first, lost, left, failure, joined, paused, resumed or takeover
    reason: str  # a sentence
    size: int  # number of workers
    nodes: tuple[str, ...]
    step: int | None = None  # committed when it began to train

    @property
    def label(self) -> str:
        """The text of the mark in a chart."""
        return f"g{self.generation} {self.cause}".rstrip()


@dataclass(frozen=True)
class Timeline:
    """All nodes of a run between two times."""

    start_s: float  # Unix time
    end_s: float
    lanes: tuple[NodeLane, ...]
    marks: tuple[GenerationMark, ...]
    hidden_nodes: int = 0  # nodes without a lane, because the chart would be too tall

    @property
    def activities(self) -> tuple[Activity, ...]:
        """The activities shown, in the order of their definition."""
        shown = {segment.activity for lane in self.lanes for segment in lane.segments}
        return tuple(activity for activity in Activity if activity in shown)


@dataclass(frozen=True)
class TimelineLimits:
    """The limits of a timeline."""

    columns: int = 820  # the chart's width in pixels
    segments: int = 4000  # in all lanes together; reached with wider columns, then fewer lanes
    lanes: int = 32  # the nodes with the lowest goodput


def timeline_of(
    goodput: Goodput,
    marks: Sequence[GenerationMark],
    limits: TimelineLimits = TimelineLimits(),
) -> Timeline:
    """The timeline of a run with its goodput; ``marks``: :func:`generation_marks`."""
    worst = sorted(goodput.nodes, key=lambda node: (node.breakdown.goodput, node.node))
    lanes: list[NodeLane] = []
    # Not much wider: an interruption of a second would look like one of an hour.
    for columns in (limits.columns, max(1, limits.columns // 2)):
        axis = _Axis(goodput.start_s, goodput.end_s, columns)
        lanes = [NodeLane(n.node, tuple(_segments(n, axis))) for n in worst[: limits.lanes]]
        if sum(len(lane.segments) for lane in lanes) <= limits.segments:
            break
    while len(lanes) > 1 and sum(len(lane.segments) for lane in lanes) > limits.segments:
        lanes.pop()
    lanes.sort(key=lambda lane: lane.node)
    hidden = len(goodput.nodes) - len(lanes)
    return Timeline(goodput.start_s, goodput.end_s, tuple(lanes), tuple(marks), hidden)


def generation_marks(records: Iterable[JournalRecord]) -> list[GenerationMark]:
    """One mark for each world that was formed, in order of time."""
    formed: dict[int, JournalRecord] = {}
    steps: dict[int, int] = {}
    for record in records:
        if record.name not in _USED:
            continue
        generation = record.whole("generation")
        if generation is None:
            continue
        if record.name == "world-formed":
            known = formed.setdefault(generation, record)
            if record.at_s < known.at_s:
                formed[generation] = record
        elif s := record.whole("step"):
            steps[generation] = min(s, steps.get(generation, s))
    marks = [_mark(generation, r, steps.get(generation)) for generation, r in formed.items()]
    return sorted(marks, key=lambda mark: mark.at_s)


def _mark(generation: int, record: JournalRecord, step: int | None) -> GenerationMark:
    nodes = record.data.get("nodes")
    return GenerationMark(
        generation=generation,
        at_s=record.at_s,
        cause=record.text("cause"),
        reason=record.text("reason"),
        size=record.whole("size") or 0,
        nodes=tuple(map(str, nodes)) if isinstance(nodes, list) else (),
        step=step,
    )


# Columns -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Axis:
    start_s: float
    end_s: float
    columns: int

    @property
    def column_s(self) -> float:
        return max(1e-9, (self.end_s - self.start_s) / self.columns)

    def index(self, at_s: float) -> int:
        return min(self.columns - 1, max(0, int((at_s - self.start_s) / self.column_s)))

    def time(self, index: int) -> float:
        return self.start_s + index * self.column_s


_Column = dict[Activity, float]  # seconds


def _segments(node: NodeGoodput, axis: _Axis) -> Iterator[Segment]:
    """The segments of a node: its agent's time while it has no worker."""
    workers, agents = _columns(node.workers, axis), _columns(node.agents, axis)
    start, shown = 0, None
    for index in range(axis.columns + 1):
        activity = None
        if index < axis.columns:
            activity = _shown(workers[index] or agents[index])
        if activity is not shown:
            if shown is not None:
                yield Segment(axis.time(start), axis.time(index), shown)
            start, shown = index, activity


def _columns(lanes: Iterable[Lane], axis: _Axis) -> list[_Column]:
    columns: list[_Column] = [{} for _ in range(axis.columns)]
    for lane in lanes:
        for stretch in lane.stretches:
            length_s = stretch.end_s - stretch.start_s
            for index in range(axis.index(stretch.start_s), axis.index(stretch.end_s) + 1):
                start_s = max(stretch.start_s, axis.time(index))
                part = (min(stretch.end_s, axis.time(index + 1)) - start_s) / length_s
                if part <= 0:
                    continue
                column = columns[index]
                for activity, took_s in stretch.seconds.items():
                    column[activity] = column.get(activity, 0.0) + took_s * part
    return columns


def _shown(column: _Column) -> Activity | None:
    if not column:
        return None
    interruptions = [activity for activity in column if activity not in _USUAL]
    return max(interruptions or column, key=lambda activity: column[activity])


# ----------------------------------------------------------------------------
# Findings of a run's agents: hangs, causes of failures, stragglers. Pure.


@dataclass(frozen=True)
class HangSummary:
    """A world without progress, and the responsible ranks."""

    at_s: float  # Unix time
    generation: int | None
    kind: str
    ranks: tuple[int, ...]
    confidence: str
    action: str
    reason: str
    report: str  # the path of the hang report, on its node; "": none was written
    node: str  # the node that wrote it


@dataclass(frozen=True)
class VerdictSummary:
    """The leader's verdict on a failure."""

    at_s: float
    generation: int | None
    failed: str  # the node
    action: str
    rule: str
    confidence: str
    reason: str
    evidence: str


@dataclass(frozen=True)
class StragglerSummary:
    """A rank that delayed the others."""

    at_s: float
    generation: int | None
    rank: int | None
    node: str
    cause: str
    factor: float
    reason: str


@dataclass(frozen=True)
class Findings:
    """All findings of a run, in order of time."""

    hangs: tuple[HangSummary, ...]
    verdicts: tuple[VerdictSummary, ...]
    stragglers: tuple[StragglerSummary, ...]


def findings_of(records: Iterable[JournalRecord]) -> Findings:
    """The findings from events in order of time."""
    hangs: dict[object, HangSummary] = {}
    verdicts, stragglers = [], []
    for record in records:
        match record.name:
            case "hang-found":
                hang = _hang(record)
                # Several nodes may report the same hang: the record with a report file is the most
                # complete.
                key = (hang.generation, hang.kind, hang.ranks)
                if key not in hangs or (hang.report and not hangs[key].report):
                    hangs[key] = hang
            case "failure-judged":
                verdicts.append(_verdict(record))
            case "straggler-found":
                stragglers.append(_straggler(record))
            case _:
                pass
    return Findings(tuple(hangs.values()), tuple(verdicts), tuple(stragglers))


def _hang(record: JournalRecord) -> HangSummary:
    ranks = record.data.get("ranks")
    return HangSummary(
        at_s=record.at_s,
        generation=record.whole("generation"),
        kind=record.text("kind"),
        ranks=tuple(r for r in ranks if isinstance(r, int)) if isinstance(ranks, list) else (),
        confidence=record.text("confidence"),
        action=record.text("action"),
        reason=record.text("reason"),
        report=record.text("report"),
        node=record.node,
    )


def _verdict(record: JournalRecord) -> VerdictSummary:
    return VerdictSummary(
        at_s=record.at_s,
        generation=record.whole("generation"),
        failed=record.text("failed"),
        action=record.text("action"),
        rule=record.text("rule"),
        confidence=record.text("confidence"),
        reason=record.text("reason"),
        evidence=record.text("evidence"),
    )


def _straggler(record: JournalRecord) -> StragglerSummary:
    return StragglerSummary(
        at_s=record.at_s,
        generation=record.whole("generation"),
        rank=record.whole("rank"),
        node=record.text("of_node"),
        cause=record.text("cause"),
        factor=record.number("factor"),
        reason=record.text("reason"),
    )


# ----------------------------------------------------------------------------
# All facts of a report: :func:`report_of`. Pure: from a run's merged journals only.


@dataclass(frozen=True)
class ReportLimits:
    """Limits of the details, for runs of any length."""

    timeline: TimelineLimits = field(default_factory=TimelineLimits)
    curves: int = MAX_CURVES
    points: int = MAX_POINTS  # of each


@dataclass(frozen=True)
class RunReport:
    """One run: events and their cost."""

    run_id: str
    goodput: Goodput
    outcome: str  # "success", "failure"; "": unknown
    outcome_reason: str
    exit_code: int | None
    has_finished: bool  # all workers of the newest world succeeded, even if no end was recorded
    have_left: bool  # all nodes: stopped, preempted, interrupted, or their workers failed
    left_because: str  # their workers failed: the first error, and its node
    timeline: Timeline
    curves: tuple[Curve, ...]
    incidents: tuple[IncidentReport, ...]
    findings: Findings
    checkpoints: CheckpointHistory
    notes: tuple[str, ...]

    @property
    def marks(self) -> tuple[GenerationMark, ...]:
        """A line for each generation."""
        return self.timeline.marks

    @property
    def failures(self) -> tuple[IncidentReport, ...]:
        """The incidents in which something failed."""
        return tuple(incident for incident in self.incidents if incident.is_failure)

    @property
    def sentence(self) -> str:
        """The summary of the run."""
        return f"{_ended(self)} {_progress(self)} {_cost(self)}"


def report_of(
    journal: MergedJournal,
    run_id: str | None = None,
    limits: ReportLimits = ReportLimits(),
) -> RunReport:
    """The report of ``run_id``, else of the run that began last. Without events it has no nodes."""
    run = run_of(journal, run_id)
    goodput = goodput_of_run(run)
    records = run.records_without("rank-times")  # most records are of this kind
    checkpoints = checkpoint_history(records)
    marks = generation_marks(records)
    outcome, reason, exit_code = _outcome(records)
    return RunReport(
        run_id=run.run_id,
        goodput=goodput,
        outcome=outcome,
        outcome_reason=reason,
        exit_code=exit_code,
        has_finished=_has_finished(records),
        have_left=have_left(records),
        left_because=_failure_that_ended(records),
        timeline=timeline_of(goodput, marks, limits.timeline),
        curves=tuple(curves_of(records, most_curves=limits.curves, most_points=limits.points)),
        incidents=tuple(incident_reports(goodput.incidents, records, checkpoints)),
        findings=findings_of(records),
        checkpoints=checkpoints,
        notes=goodput.notes,
    )


def _outcome(records: Sequence[JournalRecord]) -> tuple[str, str, int | None]:
    ended = next((r for r in reversed(records) if r.name == "job-ended"), None)
    if ended is None:
        return "", "", None
    return ended.text("outcome"), ended.text("reason"), ended.whole("exit_code")


def _failure_that_ended(records: Sequence[JournalRecord]) -> str:
    """Why a node without another start of its workers left the last world that trained, and the
    others then left, too."""
    formed = (r.time_s for r in records if r.name == "world-formed" and r.text("state") == "active")
    last_s = max(formed, default=0.0)
    left = (r for r in records if r.name == "node-leaving" and r.data.get("failed") is True)
    first = next((r for r in left if r.time_s >= last_s), None)
    return f"{printable(first.node, 60)}: {printable(first.text('reason'), 300)}" if first else ""


def _has_finished(records: Sequence[JournalRecord]) -> bool:
    formed = [r for r in records if r.name == "world-formed"]
    newest = max(formed, key=lambda r: r.whole("generation") or 0, default=None)
    if newest is None:
        return False
    generation = newest.whole("generation")
    ends = [r for r in records if r.name == "run-closed" and r.data.get("clean") is True]
    ranks = {r.whole("rank") for r in ends if r.whole("generation") == generation}
    return len(ranks) >= max(1, newest.whole("size") or 0)


# The sentence ------------------------------------------------------------------------------------


def _ended(report: RunReport) -> str:
    took = duration(report.goodput.duration_s)
    if report.outcome == "success":
        return f"The job succeeded after {took}."
    if report.outcome:
        reason = printable(report.outcome_reason, 200).rstrip(".")
        return f"The job failed after {took}{f': {reason}' if reason else ''}."
    if report.has_finished:
        return f"All workers finished, but no agent recorded the end of the job; it took {took}."
    if report.have_left and report.left_because:
        return f"All nodes left the job after {took}: {report.left_because.rstrip('.')}."
    if report.have_left:
        return f"All nodes left the job, stopped or preempted, after {took}; a restart resumes it."
    return f"The job is still running, or ended without a final event; its journals cover {took}."


def _progress(report: RunReport) -> str:
    sizes = [len(mark.nodes) for mark in report.marks if mark.nodes and mark.cause != "paused"]
    low, high = min(sizes, default=0), max(sizes, default=0)
    on = f" on {low} to {high} nodes" if low != high else f" on {counted(high, 'node')}"
    steps = counted(report.goodput.steps, "step")
    share = f"{report.goodput.breakdown.goodput:.1%}"
    return f"It committed {steps}{on if sizes else ''}; {share} of the time was productive."


# Worlds that failed before the first step interrupted none.
_NO_INCIDENTS = {False: "Training did not begin.", True: "There were no interruptions."}


def _cost(report: RunReport) -> str:
    if not report.incidents:
        return _NO_INCIDENTS[report.goodput.steps > 0]
    failed = len(report.failures)
    planned = len(report.incidents) - failed
    kinds = [counted(failed, "failure")] if failed else []
    kinds += [counted(planned, "planned change")] if planned else []
    pause_s = sum(incident.pause_s for incident in report.incidents)
    recomputed = report.goodput.recomputed_steps
    again = f", and {counted(recomputed, 'step')} had to be recomputed" if recomputed else ""
    is_over = all(incident.is_over for incident in report.incidents)
    since = "" if is_over else " No step was committed since the last failure."
    return f"{' and '.join(kinds)} paused training for {duration(pause_s)}{again}.{since}"
