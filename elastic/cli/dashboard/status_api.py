"""Documents of ``/api/status`` and ``/api/events``: docs/reference/status.md lists the fields."""

from __future__ import annotations

from typing import Any

from elastic.cli.dashboard.feed.snapshot import JobEvent, JobSnapshot
from elastic.cli.observe.status_document import SCHEMA, document


def status_document(snapshot: JobSnapshot) -> dict[str, Any]:
    """The document of ``elastic status -o json`` with the server's additional fields."""
    view = snapshot.view
    found = document(view) if view is not None else _unknown(snapshot)
    charts, outage = snapshot.charts, snapshot.outage
    found["source"] = {
        "asks_etcd": snapshot.uses_etcd,
        "view_age_s": round(max(0.0, snapshot.at_s - view.at_s), 3) if view is not None else None,
        "outage": None
        if outage is None
        else {"since": round(outage.since_s, 3), "reason": outage.reason[:1000]},
        "last_known": [line[:1000] for line in snapshot.last_known],
        "reads_journals": snapshot.reads_journals,
        "journal_goodput": round(charts.goodput, 6)
        if charts is not None and charts.goodput is not None
        else None,
        "journal_notes": [note[:1000] for note in snapshot.notes],
    }
    return found


def _unknown(snapshot: JobSnapshot) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "run_id": snapshot.run_id,
        "time": round(snapshot.at_s, 3),
        "state": snapshot.state,
        "sentence": " ".join(snapshot.last_known)[:1000],
    }


def event_document(event: JobEvent) -> dict[str, Any]:
    """The document of one event."""
    return {
        "number": event.number,
        "time": round(event.at_s, 3),
        "event": event.name,
        "node": event.node,
        "generation": event.generation,
        "step": event.step,
        "text": event.text,
    }
