"""The node's actions when the job has ended: the journal, and the failure timeline."""

from __future__ import annotations

import logging
import os

from elastic.events import FailureTimelineWritten, JobEnded
from elastic.hangs.report import ReportFolder
from elastic.leadership import failure_timeline
from elastic.membership.records import Done, decode
from elastic.node.context import NodeContext


def record_end(context: NodeContext, done: Done) -> None:
    """The job has ended with ``done``. Only the first call has an effect."""
    status = context.status
    if status.done is None and failure_timeline.is_wanted(done):
        _write_timeline(context, done)
    if status.set_done(done):
        context.journal.emit(
            JobEnded(outcome=done.outcome.value, reason=done.reason, exit_code=done.exit_code)
        )


def read_end(context: NodeContext) -> None:
    """Read from the store whether the job has ended.

    A new leader calls this once per term. Its watch may deliver the end of the old leader's key
    before the end of the job, and a leader that has left gracefully is not lost.
    """
    entry = context.store.get(context.keys.done)
    if entry is not None:
        record_end(context, decode(Done, entry.key, entry.value))


def _write_timeline(context: NodeContext, done: Done) -> None:
    """Called before the main thread receives the end, whose error contains the page."""
    keys, options = context.keys, context.options
    page = failure_timeline.render(done, keys)
    folder = options.hang_report_folder or os.environ.get("ELASTIC_JOURNAL")
    name = f"failure-timeline-{context.status.node.name}"
    path, problem = ReportFolder(folder).write_page(name, page)
    place = f"(this page is {path})" if path else f"({problem})"
    context.status.timeline = f"{page}\n{place}"
    event = FailureTimelineWritten(timeline=page, report=path, problem=problem)
    context.journal.emit(event, level=logging.WARNING if problem else logging.DEBUG)
