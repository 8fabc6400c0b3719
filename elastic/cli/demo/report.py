"""The demo's report: `elastic report` of its journals, kept when the journals are removed."""

from __future__ import annotations

import sys
from pathlib import Path

from elastic.cli.report import rendered, write_report
from elastic.errors import ElasticError
from elastic.report.charts import can_draw
from elastic.report.model import report_of
from elastic.telemetry.journal_reader import read_folder
from elastic.telemetry.merging import merge


def keep_report(journals: Path, stem: Path) -> Path | None:
    """Write ``stem``.html, or .md without matplotlib. Returns None if there is nothing to report or
    the file cannot be written; the latter prints a message and does not fail the demo."""
    report = report_of(merge(*read_folder(journals)))
    if not report.goodput.nodes:
        return None
    form = "html" if can_draw() else "md"
    path = stem.with_name(f"{stem.name}.{form}")
    try:
        write_report(path, rendered(report, form))
    except ElasticError as error:
        print(f"elastic: the demo has no report: {error}", file=sys.stderr)
        return None
    return path
