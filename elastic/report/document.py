"""A run's report for programs: ``elastic report --format json``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from elastic.report.curves import Curve
from elastic.report.incidents import IncidentReport
from elastic.report.model import RunReport
from elastic.report.timeline import GenerationMark
from elastic.telemetry.activities import Activity, Breakdown

SCHEMA = 1  # incremented when a field changes its meaning or is removed


def document(report: RunReport) -> dict[str, Any]:
    """The document of ``--format json``. Times are Unix times, durations seconds."""
    goodput, findings = report.goodput, report.findings
    return {
        "schema": SCHEMA,
        "run_id": goodput.run_id,
        "start": round(goodput.start_s, 3),
        "end": round(goodput.end_s, 3),
        "duration_s": round(goodput.duration_s, 3),
        "outcome": report.outcome or None,
        "outcome_reason": report.outcome_reason or None,
        "exit_code": report.exit_code,
        "sentence": report.sentence,
        "steps": goodput.steps,
        "recomputed_steps": goodput.recomputed_steps,
        "goodput": round(goodput.breakdown.goodput, 6),
        "seconds": _seconds(goodput.breakdown),
        "nodes": [
            {
                "node": node.node,
                "start": round(node.start_s, 3),
                "end": round(node.end_s, 3),
                "goodput": round(node.breakdown.goodput, 6),
                "seconds": _seconds(node.breakdown),
            }
            for node in goodput.nodes
        ],
        "generations": [_generation(mark) for mark in report.marks],
        "incidents": [_incident(incident) for incident in report.incidents],
        "verdicts": _facts(findings.verdicts),
        "hangs": _facts(findings.hangs),
        "stragglers": _facts(findings.stragglers),
        "checkpoints": _facts(report.checkpoints.saved),
        "skipped_checkpoints": _facts(report.checkpoints.skipped),
        "metrics": [_curve(curve) for curve in report.curves],
        "notes": list(report.notes),
    }


def _generation(mark: GenerationMark) -> dict[str, Any]:
    return {
        "generation": mark.generation,
        "time": round(mark.at_s, 3),
        "cause": mark.cause,
        "reason": mark.reason,
        "size": mark.size,
        "nodes": list(mark.nodes),
        "step": mark.step,
    }


def _incident(incident: IncidentReport) -> dict[str, Any]:
    age_s = incident.checkpoint_age_s
    return {
        "generations": list(incident.generations),
        "cause": incident.cause,
        "reason": incident.reason,
        "start": round(incident.start_s, 3),
        "duration_s": round(incident.duration_s, 3),
        "is_over": incident.is_over,
        "nodes": list(incident.nodes),
        "cost_s": round(incident.cost_s, 3),
        "seconds": {a.value: round(s, 6) for a, s in incident.phases},
        "step": incident.step,
        "state_from": incident.state_from or None,
        "errors": [{"node": node, "error": error} for node, error in incident.errors],
        "checkpoint": incident.checkpoint.name if incident.checkpoint is not None else None,
        "checkpoint_age_s": round(age_s, 3) if age_s is not None else None,
        "steps_since_checkpoint": incident.steps_at_risk,
    }


def _curve(curve: Curve) -> dict[str, Any]:
    """At most a few hundred points: the journals hold all."""
    return asdict(curve)


def _facts(found: Sequence[Any]) -> list[dict[str, Any]]:
    return [{("time" if k == "at_s" else k): v for k, v in asdict(one).items()} for one in found]


def _seconds(breakdown: Breakdown) -> dict[str, float]:
    return {a.value: round(s, 3) for a in Activity if (s := breakdown.seconds.get(a, 0.0)) > 0}
