"""The interruptions of a run: each change of its world, its cost, and the steps at risk. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastic.report.saved_checkpoints import CheckpointHistory, SavedCheckpoint
from elastic.telemetry.activities import Activity
from elastic.telemetry.goodput import PLANNED_CAUSES, IncidentGoodput
from elastic.telemetry.journal_reader import JournalRecord

_MAX_ERRORS = 3  # of one incident


@dataclass(frozen=True)
class IncidentReport:
    """A change of the world, from the last step before it to the first after it."""

    generations: tuple[int, ...]  # the worlds that were formed during it
    cause: str  # of the first: lost, left, failure, joined, paused, resumed or takeover
    reason: str
    start_s: float  # Unix time
    duration_s: float  # the longest idle time of a node
    cost_s: float  # of the run's time
    phases: tuple[tuple[Activity, float], ...]  # seconds of the run's time, roughly in order
    nodes: tuple[str, ...]  # the nodes that were idle
    step: int | None  # committed when it began
    state_from: str  # the source of the state for workers that lacked it; "": all had it
    errors: tuple[tuple[str, str], ...]  # node, and what its worker raised; consequences included
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


def incident_reports(
    incidents: Sequence[IncidentGoodput],
    records: Iterable[JournalRecord],
    checkpoints: CheckpointHistory,
) -> list[IncidentReport]:
    """One report per incident; ``records``: the run's records, in order of time."""
    wanted = ("world-fault", "world-joined", "state-restored", "state-received", "worker-died")
    relevant = [record for record in records if record.name in wanted]
    return [_report(incident, relevant, checkpoints) for incident in incidents]


def _report(
    incident: IncidentGoodput, relevant: Sequence[JournalRecord], checkpoints: CheckpointHistory
) -> IncidentReport:
    first = bisect_left(relevant, incident.start_s, key=lambda r: r.at_s)
    within = relevant[first : bisect_right(relevant, incident.end_s, key=lambda r: r.at_s)]
    faults = [r for r in within if r.name == "world-fault"]
    steps = [s for r in faults if (s := r.whole("step")) is not None]
    steps = steps or [
        s for r in within if r.name == "world-joined" and (s := r.whole("step")) is not None
    ]
    seconds = incident.breakdown.seconds
    return IncidentReport(
        generations=incident.generations,
        cause=incident.cause,
        reason=incident.reason,
        start_s=incident.start_s,
        duration_s=incident.duration_s,
        cost_s=incident.breakdown.total_s,
        phases=tuple((a, seconds[a]) for a in Activity if seconds.get(a, 0.0) > 0),
        nodes=incident.nodes,
        step=max(steps, default=None),
        state_from=_state_from(within),
        errors=tuple(_errors(within)),
        checkpoint=checkpoints.last_before(incident.start_s),
        is_over=incident.is_over,
    )


def _state_from(within: Sequence[JournalRecord]) -> str:
    received = {r.whole("source") for r in within if r.name == "state-received"}
    restored = {r.text("source") for r in within if r.name == "state-restored"}
    found = [f"rank {rank}" for rank in sorted(r for r in received if r is not None)]
    found += [
        "the initial state" if source == "initial" else f"checkpoint {source}"
        for source in sorted(restored)
        if source
    ]
    return ", ".join(found)


def _errors(within: Sequence[JournalRecord]) -> list[tuple[str, str]]:
    died = [(r.node, r.text("reason")) for r in within if r.name == "worker-died"]
    raised = [(r.node, r.text("error")) for r in within if r.name == "world-fault"]
    known = [(node, text) for node, text in (*died, *raised) if text.strip()]
    return list(dict.fromkeys(known))[:_MAX_ERRORS]
