"""A run's report as one HTML file: no network, no script, at most ``MAX_BYTES`` long.

Untrusted text (names, reasons, tracebacks) is shortened, made printable and escaped. A page that
would be too long is created again with fewer rows and shorter texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.report.charts import breakdown_svg, curve_svg, require_matplotlib, timeline_svg
from elastic.report.curves import Curve, thinned
from elastic.report.incidents import IncidentReport
from elastic.report.model import RunReport, counted
from elastic.report.palette import name_of, variables
from elastic.report.svg import FONT
from elastic.telemetry.activities import Activity, Breakdown
from elastic.telemetry.printable import duration, printable, timestamp

if TYPE_CHECKING:
    from jinja2 import Template

MAX_BYTES = 250_000
_TEMPLATES = Path(__file__).parent / "templates"
_MAX_NAMES = 12
_CURVE_ROWS = 24  # of a curve's table
_MAX_LINES = 30  # of a traceback: its last ones


@dataclass(frozen=True)
class _Size:
    """How much of everything a page shows."""

    rows: int = 40
    text: float = 1.0  # the share of a text's usual length


_SIZES = (_Size(), _Size(20, 0.5), _Size(10, 0.3), _Size(5, 0.2), _Size(2, 0.1))


def html(report: RunReport) -> str:
    """The page. Raises ConfigError without matplotlib."""
    require_matplotlib()
    charts = _Charts.of(report)
    page = ""
    for size in _SIZES:
        page = _template(size).render(**_context(report, charts, size))
        if len(page.encode()) <= MAX_BYTES:
            break
    return page


# What the page shows -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _DrawnCurve:
    curve: Curve
    svg: str
    rows: Sequence[tuple[int, float]]


@dataclass(frozen=True)
class _Charts:
    timeline: str
    breakdown: str
    curves: tuple[_DrawnCurve, ...]

    @staticmethod
    def of(report: RunReport) -> _Charts:
        drawn = (
            _DrawnCurve(
                curve,
                curve_svg(curve, report.marks, name=f"curve-{number}"),
                thinned(list(zip(curve.steps, curve.values, strict=True)), _CURVE_ROWS),
            )
            for number, curve in enumerate(report.curves)
        )
        return _Charts(
            timeline_svg(report.timeline), breakdown_svg(report.goodput.breakdown), tuple(drawn)
        )


class _Rows(list[Any]):
    """The first of many, and how many more there are."""

    def __init__(self, items: Sequence[Any], most: int) -> None:
        super().__init__(items[:most])
        self.hidden = max(0, len(items) - most)


def _context(report: RunReport, charts: _Charts, size: _Size) -> dict[str, Any]:
    from markupsafe import Markup

    goodput, findings = report.goodput, report.findings
    rows = partial(_Rows, most=size.rows)
    worst = sorted(report.incidents, key=lambda i: -i.cost_s)[: size.rows]
    incidents = _Rows([i for i in report.incidents if i in worst], size.rows)
    incidents.hidden = len(report.incidents) - len(incidents)
    return {
        "report": report,
        "title": f"Run {printable(report.run_id, 80)}" if report.run_id else "Run without a name",
        **_headline(report),
        "variables": Markup(variables(":root")),
        "font": Markup(FONT),
        "facts": list(_facts(report)),
        "sections": list(_sections(report)),
        "timeline_svg": Markup(charts.timeline),
        "breakdown_svg": Markup(charts.breakdown),
        "legend": [(name_of(a), a.value) for a in report.timeline.activities],
        "marks": rows(report.marks),
        "parts": list(_parts(goodput.breakdown)),
        "nodes": rows(sorted(goodput.nodes, key=lambda n: n.breakdown.goodput)),
        "curves": [_DrawnCurve(d.curve, Markup(d.svg), d.rows) for d in charts.curves],
        "incidents": incidents,
        "phases": [a for a in Activity if any(_phase_s(i, a) >= 0.0005 for i in incidents)],
        "failures": rows(report.failures),
        "verdicts": rows(findings.verdicts),
        "hangs": rows(findings.hangs),
        "stragglers": rows(findings.stragglers),
        "skipped": rows(report.checkpoints.skipped),
        "checkpoint_sentence": _checkpoint_sentence(report),
        "notes": rows(report.notes),
    }


def _headline(report: RunReport) -> dict[str, str]:
    first, _, rest = report.sentence.partition(". ")
    kind = {"success": "succeeded", "": ""}.get(report.outcome, "failed")
    return {"outcome": f"{first}.", "sentence": rest, "outcome_class": kind}


def _facts(report: RunReport) -> Iterator[tuple[str, str]]:
    goodput = report.goodput
    yield "Goodput", f"{goodput.breakdown.goodput:.1%}"
    yield "Wall time", duration(goodput.duration_s)
    yield "Steps", f"{goodput.steps:,}"
    yield "Recomputed steps", f"{goodput.recomputed_steps:,}"
    yield "Nodes", str(len(goodput.nodes))
    yield "Generations", str(len(report.marks))
    yield "Failures", str(len(report.failures))
    if report.exit_code is not None:
        yield "Exit code", str(report.exit_code)
    yield "Started", f"{timestamp(goodput.start_s)[:16].replace('T', ' ')} UTC"


def _sections(report: RunReport) -> Iterator[tuple[str, str]]:
    if report.notes:
        yield "notes", "Notes"
    yield from (("timeline", "Timeline"), ("time", "Where the time went"))
    if report.curves:
        yield "curves", "Loss" if report.curves[0].name == "loss" else "Metrics"
    yield from (("incidents", "Incidents"), ("verdicts", "Verdicts and hangs"))
    yield "checkpoints", "Checkpoints"


def _parts(breakdown: Breakdown) -> Iterator[tuple[str, float, float]]:
    total_s = breakdown.total_s or 1.0
    productive_s = breakdown.seconds.get(Activity.PRODUCTIVE, 0.0)
    for activity, took_s in ((Activity.PRODUCTIVE, productive_s), *breakdown.losses):
        yield activity.value, took_s, took_s / total_s


def _checkpoint_sentence(report: RunReport) -> str:
    history = report.checkpoints
    last = history.last
    if last is None:
        return "No checkpoint was committed."
    mean_s = sum(saved.duration_s for saved in history.saved) / len(history.saved)
    age_s = max(0.0, report.goodput.end_s - last.at_s)
    return (
        f"{counted(len(history.saved), 'checkpoint')} committed, {duration(mean_s)} each on "
        f"average; training waited {duration(history.stall_s)} for all of them. The last one, "
        f"{printable(last.name, 80)} of step {last.step}, is {duration(age_s)} older than the end "
        "of the journals."
    )


# Rendering ---------------------------------------------------------------------------------------


def _template(size: _Size) -> Template:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Callable[..., str]] = {
        "text": partial(_text, size),
        "lines": partial(_lines, size),
        "names": partial(_names, size),
        "utc": timestamp,
        "took": lambda seconds: duration(max(0.0, seconds)),
        "percent": lambda share: f"{share:.1%}",
        "value": lambda number: f"{number:.6g}",
        "ms": _ms,
        "phase_ms": lambda incident, phase: _ms(_phase_s(incident, phase)),
        "losses": _losses,
        "counted": counted,
    }
    environment.filters.update(filters)
    return environment.get_template("report.html")


def _text(size: _Size, text: str, limit: int = 200) -> str:
    return printable(str(text), max(16, int(limit * size.text)))


def _lines(size: _Size, text: str) -> str:
    """A traceback: its last lines, each of them printable."""
    lines = str(text).splitlines()
    shown = [_text(size, line, 300) for line in lines[-max(3, int(_MAX_LINES * size.text)) :]]
    if len(shown) < len(lines):
        shown.insert(0, f"… ({len(lines) - len(shown)} lines before)")
    return "\n".join(shown)


def _names(size: _Size, names: Sequence[str]) -> str:
    shown = [_text(size, name, 60) for name in names[:_MAX_NAMES]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _phase_s(incident: IncidentReport, phase: Activity) -> float:
    return dict(incident.phases).get(phase, 0.0)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.0f}" if seconds >= 0.0005 else ""


def _losses(breakdown: Breakdown, count: int) -> str:
    shown = [f"{a.value} {duration(s)}" for a, s in breakdown.losses[:count] if s >= 0.0005]
    return ", ".join(shown)
