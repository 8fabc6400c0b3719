"""The timeline of a run: the activities of each node, in at most one segment per pixel. Pure.

A column of the chart may cover much time: hours of steps, and within them a recovery of
a second. So a column shows an interruption if it contains one, else the activity that took
most of it. Consecutive columns with the same activity are one segment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from elastic.telemetry.activities import Activity, Lane
from elastic.telemetry.goodput import Goodput, NodeGoodput
from elastic.telemetry.journal_reader import JournalRecord

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
