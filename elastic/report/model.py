"""All facts of a report: :func:`report_of`. Pure: from a run's merged journals only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from elastic.report.curves import MAX_CURVES, MAX_POINTS, Curve, curves_of
from elastic.report.incidents import IncidentReport, incident_reports
from elastic.report.saved_checkpoints import CheckpointHistory, checkpoint_history
from elastic.report.timeline import (
    GenerationMark,
    Timeline,
    TimelineLimits,
    generation_marks,
    timeline_of,
)
from elastic.report.verdicts import Findings, findings_of
from elastic.telemetry.goodput import Goodput, goodput_of_run
from elastic.telemetry.journal_reader import JournalRecord
from elastic.telemetry.merging import MergedJournal, run_of
from elastic.telemetry.printable import duration, printable


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
    return f"The job is still running, or ended without a final event; its journals cover {took}."


def _progress(report: RunReport) -> str:
    sizes = [len(mark.nodes) for mark in report.marks if mark.nodes and mark.cause != "paused"]
    low, high = min(sizes, default=0), max(sizes, default=0)
    on = f" on {low} to {high} nodes" if low != high else f" on {counted(high, 'node')}"
    steps = counted(report.goodput.steps, "step")
    share = f"{report.goodput.breakdown.goodput:.1%}"
    return f"It committed {steps}{on if sizes else ''}; {share} of the time was productive."


def _cost(report: RunReport) -> str:
    if not report.incidents:
        return "There were no interruptions."
    failed = len(report.failures)
    planned = len(report.incidents) - failed
    kinds = [counted(failed, "failure")] if failed else []
    kinds += [counted(planned, "planned change")] if planned else []
    cost_s = sum(incident.cost_s for incident in report.incidents)
    recomputed = report.goodput.recomputed_steps
    again = f", and {counted(recomputed, 'step')} had to be recomputed" if recomputed else ""
    is_over = all(incident.is_over for incident in report.incidents)
    since = "" if is_over else " No step was committed since the last failure."
    return f"{' and '.join(kinds)} cost {duration(cost_s)}{again}.{since}"


def counted(number: int, noun: str) -> str:
    """
    >>> counted(1, "step"), counted(1200, "step")
    ('1 step', '1,200 steps')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
