"""The demo's report: what `elastic report` says of its journals, kept when they are removed."""

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
    """Write ``stem``.html, or .md where matplotlib is missing; None: there is nothing to report,
    or it cannot be written, which is said and harms nothing else."""
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
