"""Goodput: how much of a run's time made progress, and where the rest went.

A pure function of the journal: :func:`goodput_of_run`. A node's time is the average over its
workers or, while it has none, its agent's. A run's time is the average over the nodes that are
present, so it adds up to the wall time from the first line to the last. The parts are in
:mod:`elastic.telemetry.activities`; :mod:`elastic.telemetry.lanes` turns journal lines into time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite

from elastic.telemetry.activities import (
    Activity,
    Breakdown,
    Interruption,
    Lane,
    Weight,
    between,
    counts,
    union,
)
from elastic.telemetry.journal_reader import JournalRecord
from elastic.telemetry.lanes import agent_lane, lane_start, worker_lane
from elastic.telemetry.merging import JournalWriter, RunJournal
from elastic.telemetry.step_history import StepHistory, step_history

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
    breakdown: Breakdown  # losses only: seconds of the run's time
    is_over: bool = True  # False: no step was committed since, and the run has not ended

    @property
    def duration_s(self) -> float:
        """The longest idle time of a node during the incident."""
        return self.end_s - self.start_s


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
    _weights: list[tuple[Lane, Weight]] = field(default_factory=list)

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
                self._weights.append((lane, run))
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

    def losses(self, span: Interruption) -> dict[Activity, float]:
        """Seconds of the run's time, within an interruption."""
        lost: dict[Activity, float] = defaultdict(float)
        for lane, run in self._weights:
            first = bisect_right(lane.stretches, span.start_s, key=lambda s: s.end_s)
            for stretch in lane.stretches[first:]:
                if stretch.start_s >= span.end_s:
                    break
                start_s, end_s = max(stretch.start_s, span.start_s), min(stretch.end_s, span.end_s)
                part = (end_s - start_s) / (stretch.end_s - stretch.start_s)
                share = part * run.mean(start_s, end_s)
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
    broke, and is younger than the ``newest`` with steps. None once the job has ended."""
    is_ended = any(record.name == "job-ended" for record in changes)
    broken_s = min(
        (
            record.at_s
            for record in changes
            if (record.whole("generation") or 0) > newest
            and record.text("cause") not in PLANNED_CAUSES
        ),
        default=inf,
    )
    if is_ended or not newest:
        return []
    stops = [(node, stop) for node in nodes if (stop := node.open_interruption())]
    return [(node, stop) for node, stop in stops if stop.end_s > broken_s]


def _incidents(
    nodes: Sequence[_NodeTime], records: Iterable[JournalRecord], newest: int
) -> Iterable[IncidentGoodput]:
    """One incident per interruption in which worlds were formed, with all interrupted nodes.

    ``newest``: the newest generation with steps.
    """
    changes = [r for r in records if r.name in ("world-formed", "job-ended")]
    formed = sorted((r for r in changes if r.name == "world-formed"), key=lambda r: r.at_s)
    open_stops = _open_stops(nodes, changes, newest)
    open_s = min((stop.start_s for _, stop in open_stops), default=inf)
    stops = [(node, stop) for node in nodes for stop in node.interruptions()] + open_stops
    times = union((stop.start_s, stop.end_s) for _, stop in stops)
    began_s = min(
        (lane.progress[0][0] for n in nodes for lane in n.workers if lane.progress), default=0.0
    )
    charged: set[int] = set()
    for (start_s, end_s), worlds in _standstills(times, [r for r in formed if r.at_s >= began_s]):
        stopped = [(n, s) for n, s in stops if s.start_s >= start_s and s.end_s <= end_s]
        seconds = _sum(node.losses(stop) for node, stop in stopped)
        first = worlds[0].whole("generation") or 0
        for node in nodes:
            for generation, lost_s in node.discarded.items():
                if generation < first and generation not in charged:
                    recomputed_s = seconds.get(Activity.RECOMPUTED, 0.0)
                    seconds[Activity.RECOMPUTED] = recomputed_s + lost_s
        charged.update(g for node in nodes for g in node.discarded if g < first)
        yield IncidentGoodput(
            generations=tuple(r.whole("generation") or 0 for r in worlds),
            cause=worlds[0].text("cause"),
            reason=_reason(worlds),
            start_s=start_s,
            end_s=end_s,
            nodes=tuple(sorted({node.name for node, _ in stopped})),
            breakdown=Breakdown({a: s for a, s in seconds.items() if s > 0}),
            is_over=end_s <= open_s,
        )
