"""The charts of the page, drawn from the journals by :mod:`elastic.report`.

The page's Content-Security-Policy forbids inline styles: ``style`` attributes of an SVG
become presentation attributes, and its ``<style>`` is left to the page.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence

from elastic.cli.dashboard.feed.snapshot import RunCharts
from elastic.errors import ConfigError
from elastic.telemetry.journal_reader import JournalRecord

LARGEST = 36_000  # bytes of a chart: a page is 250 kB at most
_SEGMENTS = 400  # per timeline, so that a chart stays below LARGEST
_NAMESPACE = "http://www.w3.org/2000/svg"


def charts_of(
    records: Sequence[JournalRecord], notes: Sequence[str], run_id: str | None
) -> RunCharts:
    """Draw the charts. Imports matplotlib; a chart that cannot be drawn becomes a sentence."""
    from elastic.report.charts import breakdown_svg, curve_svg, timeline_svg
    from elastic.report.curves import curves_of
    from elastic.report.timeline import TimelineLimits, generation_marks, timeline_of
    from elastic.telemetry.goodput import goodput_of_run
    from elastic.telemetry.merging import merge, run_of

    run = run_of(merge(records, notes), run_id)
    goodput = goodput_of_run(run)
    if not goodput.nodes:
        return RunCharts(problem="The journals have no events of this run yet.")
    of_run = run.records
    marks = generation_marks(of_run)
    timeline = timeline_of(goodput, marks, TimelineLimits(segments=_SEGMENTS))
    try:
        drawn = _fitting(lambda: timeline_svg(timeline))
        breakdown = _fitting(lambda: breakdown_svg(goodput.breakdown))
        curves = tuple(
            _fitting(lambda c=curve, n=number: curve_svg(c, marks, name=f"curve-{n}"))  # type: ignore[misc]
            for number, curve in enumerate(curves_of(of_run, most_curves=1))
        )
    except ConfigError as error:  # matplotlib is missing
        return RunCharts(problem=str(error))
    return RunCharts(
        timeline=drawn,
        breakdown=breakdown,
        curves=curves,
        goodput=goodput.breakdown.goodput,
        goodput_of_s=goodput.duration_s,
        legend=tuple(activity.value for activity in timeline.activities),
    )


def _fitting(draw: Callable[[], str]) -> str:
    svg = without_styles(draw())
    return svg if len(svg.encode()) <= LARGEST else ""


def without_styles(svg: str) -> str:
    """The same chart with presentation attributes, which a strict policy allows.

    >>> without_styles('<svg><style>a{}</style><path style="fill:var(--ink);opacity:0.5" /></svg>')
    '<svg><path fill="var(--ink)" opacity="0.5" /></svg>'
    """
    ET.register_namespace("", _NAMESPACE)
    root = ET.fromstring(svg)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.rpartition("}")[2] == "style":
                parent.remove(child)
    for element in root.iter():
        for declaration in element.attrib.pop("style", "").split(";"):
            name, colon, value = declaration.partition(":")
            if colon:
                element.set(name.strip(), value.strip())
    return ET.tostring(root, encoding="unicode")
