"""The report of a job as text, Markdown, HTML and JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.report.model import (
    Curve,
    GenerationMark,
    IncidentReport,
    NodeLane,
    RunReport,
    Timeline,
    thinned,
)
from elastic.telemetry.goodput import Activity, Breakdown
from elastic.telemetry.log import counted, duration, printable, timestamp
from elastic.tracebacks import exception_line

if TYPE_CHECKING:
    from jinja2 import Environment


# ----------------------------------------------------------------------------
# Colours of charts and pages, each for a light and a dark background, as CSS variables.
#
# Contrast is at least 3:1 against the background, for texts 4.5:1 (WCAG 2.1). Charts do not rely
# on colour alone: a table next to each contains the same information.

# name: (light, dark)
COLOURS: Mapping[str, tuple[str, str]] = {
    "ink": ("#1f2328", "#e6edf3"),
    "muted": ("#59636e", "#9198a1"),
    "line": ("#d1d9e0", "#3d444d"),
    "paper": ("#ffffff", "#0d1117"),
    "panel": ("#f6f8fa", "#151b23"),
    "link": ("#0969da", "#4493f8"),
    "good": ("#1a7f37", "#3fb950"),
    "bad": ("#d1242f", "#f85149"),
    "warn": ("#fff8c5", "#341a00"),  # a background
    "productive": ("#2c974b", "#3fb970"),
    "start-up": ("#7d8898", "#8d99ad"),
    "waiting-for-nodes": ("#6b4fa0", "#9f86d6"),
    "data-wait": ("#a38300", "#e3c341"),
    "checkpoint-stall": ("#0072b2", "#4aa8e0"),
    "straggling": ("#5b8c00", "#93cf3a"),
    "evaluation": ("#1b8a8f", "#3bbfc4"),
    "recomputed-steps": ("#d06c00", "#ff9d3b"),
    "detection": ("#b00020", "#ff5d6c"),
    "abort": ("#d1495b", "#e8808d"),
    "rendezvous": ("#c2185b", "#f06a9b"),
    "rebuild": ("#8e3b9e", "#c77bd6"),
    "state-transfer": ("#a0522d", "#cf8a66"),
    "first-step": ("#76762a", "#b5b556"),
    "shutdown": ("#4f73a8", "#7f9fcb"),
    "unreported": ("#5c6470", "#a9b2bf"),
    "no-nodes": ("#3d3d3d", "#d0d0d0"),
}


def name_of(activity: Activity) -> str:
    """The name of an activity's colour, also valid as a CSS class.

    >>> name_of(Activity.DATA)
    'data-wait'
    """
    return activity.value.replace(" ", "-")


def variables(selector: str) -> str:
    """CSS: the colours for ``selector``, by the reader's theme."""
    light, dark = (
        f"{selector}{{{''.join(f'--{name}:{pair[theme]};' for name, pair in COLOURS.items())}}}"
        for theme in (0, 1)
    )
    return f"{light}@media(prefers-color-scheme:dark){{{dark}}}"


# ----------------------------------------------------------------------------
# The charts of a run: lines and texts, which the template chart.svg turns into an SVG element.
#
# Colours are CSS variables, so that a chart follows the reader's theme. Each chart has a title and
# a description for screen readers. Thick lines are bars: they take a third of a rectangle's bytes.

WIDTH = 960  # of every chart, in pixels
_LEFT, _RIGHT = 128, 20  # beside the axes
_INNER = WIDTH - _LEFT - _RIGHT
_LANE = 30
_LABEL_ROWS = 3  # of generations above a timeline
_LABEL_ROW = 16
_TOP = _LABEL_ROWS * _LABEL_ROW + 8
_CHARACTER = 6.8  # width of one in a label, about
_MAX_MARKS = 80  # lines of generations in one chart
_LONGEST_NAME = 18
# Between two ticks of a time axis, in seconds.
_TICKS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800),
)


@dataclass(frozen=True)
class Line:
    """A path of an SVG."""

    path: str
    colour: str  # a name in COLOURS
    width: float = 1.0
    dash: str = "none"


@dataclass(frozen=True)
class Label:
    """A text in a chart."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    colour: str = "ink"


@dataclass
class Chart:
    """A chart of ``height`` pixels. ``name``: the prefix of its ids, unique on a page."""

    name: str
    title: str
    height: int
    description: str = ""
    lines: list[Line] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    width: int = WIDTH

    def bar(self, x: float, y: float, end_x: float, width: float, colour: str) -> None:
        """Add a horizontal bar around ``y``."""
        self.lines.append(Line(f"M{x:.1f} {y:.1f}H{end_x:.1f}", colour, width))

    def row(self, y: float, text: str) -> None:
        """Name a row, beside the axes."""
        self.labels.append(Label(_LEFT - 8, y + 4, text, "end"))

    def ticks(self, ticks: Sequence[tuple[float, str]], top: float, bottom: float) -> None:
        """Add vertical lines with labels below."""
        path = "".join(f"M{x:.1f} {top}V{bottom}" for x, _ in ticks)
        self.lines.insert(0, Line(path, "line"))
        self.labels += [Label(x, bottom + 16, text, "middle", "muted") for x, text in ticks]

    def marks(self, marks: Sequence[tuple[float, str]], top: float, bottom: float) -> None:
        """Add dashed lines with labels in rows above; without room, no label."""
        path = ""
        ends = [float("-inf")] * _LABEL_ROWS  # of the last label of each row
        for x, text in marks[:: max(1, -(-len(marks) // _MAX_MARKS))]:
            shown = printable(text, 24)
            width = len(shown) * _CHARACTER
            begin = min(x - 3, WIDTH - _RIGHT - width)
            row = next((r for r, end in enumerate(ends) if begin > end), None)
            above = top - 6 - (row or 0) * _LABEL_ROW
            path += f"M{x:.1f} {bottom}V{above}"
            if row is not None:
                ends[row] = begin + width + 6
                self.labels.append(Label(begin, above - 3, shown))
        self.lines.append(Line(path, "ink", dash="3 2"))


# Timeline ----------------------------------------------------------------------------------------


def timeline_chart(timeline: Timeline, name: str = "timeline-chart") -> Chart:
    """A lane for each node, coloured by activity, and a line for each generation."""
    bottom = _TOP + _LANE * max(1, len(timeline.lanes))
    chart = Chart(name, "Timeline of the nodes", bottom + 34, _described_timeline(timeline))
    length_s = max(1e-6, timeline.end_s - timeline.start_s)

    def x(at_s: float) -> float:
        return _LEFT + (at_s - timeline.start_s) / length_s * _INNER

    every_s = next((s for s in _TICKS if length_s / s <= 10), length_s / 8)
    ticks = [i * every_s for i in range(int(length_s / every_s) + 1)]
    chart.ticks([(x(timeline.start_s + s), _tick(s)) for s in ticks], _TOP, bottom)
    paths: dict[Activity, list[str]] = {}
    for row, lane in enumerate(timeline.lanes):
        y = _TOP + (row + 0.5) * _LANE
        for segment in lane.segments:
            ends = f"M{x(segment.start_s):.1f} {y:g}H{x(segment.end_s):.1f}"
            paths.setdefault(segment.activity, []).append(ends)
    for activity in timeline.activities:
        chart.lines.append(Line("".join(paths[activity]), name_of(activity), 0.72 * _LANE))
    for row, label in enumerate(lane_labels([lane.node for lane in timeline.lanes])):
        chart.row(_TOP + (row + 0.5) * _LANE, label)
    chart.marks([(x(m.at_s), m.label) for m in timeline.marks], _TOP, bottom)
    return chart


def lane_labels(nodes: Sequence[str]) -> list[str]:
    """Names that fit beside the chart and stay distinct: without their domain if that suffices,
    with their first and last characters.

    >>> lane_labels(["ip-10-0-0-12.internal", "ip-10-0-0-13.internal"])
    ['ip-10-0-0-12', 'ip-10-0-0-13']
    >>> lane_labels(["llama-training-7-worker-12"])
    ['llama-t…-worker-12']
    """
    hosts = [node.partition(".")[0] for node in nodes]
    names = hosts if all(hosts) and len(set(hosts)) == len(set(nodes)) else nodes
    return [_abbreviated(printable(_abbreviated(name))) for name in names]


def _abbreviated(name: str) -> str:
    head, tail = _LONGEST_NAME * 2 // 5, _LONGEST_NAME * 3 // 5
    return name if len(name) <= _LONGEST_NAME else f"{name[:head]}…{name[-tail:]}"


def _tick(seconds: float) -> str:
    """The label of a tick: time since the start, in at most two units.

    >>> [_tick(s) for s in (0, 0.02, 30, 90, 7200, 9000, 172800)]
    ['0', '20 ms', '30 s', '1 min 30 s', '2 h', '2 h 30 min', '2 d']
    """
    if seconds == 0:
        return "0"
    if seconds < 1:
        return f"{seconds * 1000:g} ms"
    if seconds < 60:
        return f"{seconds:g} s"
    return duration(seconds).replace(" 0 s", "").replace(" 0 min", "").replace(" 0 h", "")


def _described_timeline(timeline: Timeline) -> str:
    count = len(timeline.lanes)
    sentences = [
        f"{count} {'node' if count == 1 else 'nodes'} over "
        f"{duration(timeline.end_s - timeline.start_s)}."
    ]
    sentences += [_described_mark(mark, timeline.start_s) for mark in timeline.marks[:12]]
    if (more := len(timeline.marks) - 12) > 0:
        sentences.append(f"And {more} more generations.")
    sentences += [_described_lane(lane) for lane in timeline.lanes[:8]]
    return " ".join(sentences)


def _described_mark(mark: GenerationMark, start_s: float) -> str:
    after = duration(max(0.0, mark.at_s - start_s))
    return f"Generation {mark.generation} after {after}: {printable(mark.cause, 40)}."


def _described_lane(lane: NodeLane) -> str:
    seconds: dict[Activity, float] = {}
    for s in lane.segments:
        seconds[s.activity] = seconds.get(s.activity, 0.0) + s.end_s - s.start_s
    most = sorted(seconds.items(), key=lambda pair: -pair[1])[:3]
    parts = ", ".join(f"{activity.value} {duration(took_s)}" for activity, took_s in most)
    return f"{printable(lane.node, 60)}: mostly {parts}."


# Breakdown ---------------------------------------------------------------------------------------


def breakdown_chart(breakdown: Breakdown, name: str = "breakdown-chart") -> Chart:
    """Where the time went: one bar for all of it, and one for each kind of loss."""
    losses, row, top = breakdown.losses, 24, 26
    height = top + row + 18 + row * max(1, len(losses)) + 10
    chart = Chart(name, "Where the time went", height, _described_breakdown(breakdown))
    total_s = breakdown.total_s or 1.0
    chart.labels.append(Label(_LEFT, 17, f"{breakdown.goodput:.1%} productive"))
    chart.row(top + row / 2, "all time")
    x = float(_LEFT)
    for activity, took_s in parts_of_time(breakdown):
        end_x = x + took_s / total_s * _INNER
        chart.bar(x, top + row / 2, end_x, 0.8 * row, name_of(activity))
        x = end_x
    for place, (activity, took_s) in enumerate(losses):
        y = top + row + 18 + (place + 0.5) * row
        end_x = _LEFT + took_s / losses[0][1] * _INNER * 0.8  # room for the numbers
        chart.bar(_LEFT, y, end_x, 0.7 * row, name_of(activity))
        chart.row(y, activity.value)
        label = f"{duration(took_s)} ({took_s / total_s:.1%})"
        chart.labels.append(Label(end_x + 8, y + 4, label))
    if not losses:
        chart.row(top + row * 1.5 + 18, "no losses")
    return chart


def parts_of_time(breakdown: Breakdown) -> list[tuple[Activity, float]]:
    """Productive time, then the losses, largest first."""
    productive_s = breakdown.seconds.get(Activity.PRODUCTIVE, 0.0)
    return [(Activity.PRODUCTIVE, productive_s), *breakdown.losses]


def _described_breakdown(breakdown: Breakdown) -> str:
    total_s = breakdown.total_s or 1.0
    sentences = [f"{breakdown.goodput:.1%} of {duration(breakdown.total_s)} productive."]
    sentences += [
        f"{activity.value} {duration(took_s)}, {took_s / total_s:.1%}."
        for activity, took_s in breakdown.losses
    ]
    return " ".join(sentences)


# Curves ------------------------------------------------------------------------------------------


def curve_chart(curve: Curve, marks: Sequence[GenerationMark] = (), name: str = "curve") -> Chart:
    """One quantity over steps, with a line where a generation began to train."""
    inner = 190
    bottom = _TOP + inner
    first, last = curve.steps[0], curve.steps[-1]
    shown = [m for m in marks if m.step is not None and first <= m.step <= last]
    quantity = printable(curve.name, 60)
    chart = Chart(name, f"{quantity} by step", bottom + 40, _described_curve(curve, shown))
    low, high = min(curve.values), max(curve.values)
    span = (high - low) or abs(high) or 1.0
    low, high = low - 0.08 * span, high + 0.08 * span

    def x(step: float) -> float:
        return _LEFT + (step - first) / max(1, last - first) * _INNER

    def y(value: float) -> float:
        return bottom - (value - low) / (high - low) * inner

    chart.ticks([(x(s), f"{s:g}") for s in round_numbers(first, last, 8, least=1)], _TOP, bottom)
    for value in round_numbers(low, high, 5):
        chart.bar(_LEFT, y(value), WIDTH - _RIGHT, 1, "line")
        chart.labels.append(Label(_LEFT - 8, y(value) + 4, f"{value:.6g}", "end", "muted"))
    points = [f"{x(s):.1f} {y(v):.1f}" for s, v in zip(curve.steps, curve.values, strict=True)]
    if len(points) == 1:
        chart.bar(x(first) - 3, y(curve.last), x(first) + 3, 6, "link")
    else:
        chart.lines.append(Line(f"M{'L'.join(points)}", "link", 1.6))
    chart.labels.append(Label(_LEFT + _INNER / 2, bottom + 34, "step", "middle", "muted"))
    chart.labels.append(Label(8, _TOP - 8, printable(curve.name, 30), "start", "muted"))
    chart.marks([(x(m.step or 0), m.label) for m in shown], _TOP, bottom)
    return chart


def round_numbers(low: float, high: float, most: int, least: float = 0.0) -> list[float]:
    """At most ``most`` multiples of 1, 2 or 5 times a power of ten, at least ``least`` apart.

    >>> round_numbers(0.03, 2.4, 5), round_numbers(1, 2, 5, least=1), round_numbers(3, 3, 5)
    ([0.5, 1.0, 1.5, 2.0], [1.0, 2.0], [3])
    """
    if high <= low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    steps = (power * factor for factor in (1, 2, 5, 10, 20))
    step = next(s for s in steps if s >= least and (high - low) / s < most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _described_curve(curve: Curve, marks: Sequence[GenerationMark]) -> str:
    sentences = [
        f"{printable(curve.name, 60)} from step {curve.steps[0]} to {curve.steps[-1]}: "
        f"first {curve.values[0]:.4g}, last {curve.last:.4g}, lowest {curve.lowest:.4g}, "
        f"highest {curve.highest:.4g}."
    ]
    sentences += [
        f"Generation {m.generation} from step {m.step}: {printable(m.cause, 40)}."
        for m in marks[:12]
    ]
    return " ".join(sentences)


# ----------------------------------------------------------------------------
# A run's report for programs: ``elastic report -o json``.

SCHEMA = 2  # incremented when a field changes its meaning or is removed


def document(report: RunReport) -> dict[str, Any]:
    """The document of ``-o json``. Times are Unix times, durations seconds."""
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
        "verdicts": _facts_document(findings.verdicts),
        "hangs": _facts_document(findings.hangs),
        "stragglers": _facts_document(findings.stragglers),
        "checkpoints": _facts_document(report.checkpoints.saved),
        "skipped_checkpoints": _facts_document(report.checkpoints.skipped),
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
        "time": round(incident.at_s, 3),
        "start": round(incident.start_s, 3),
        "pause_s": round(incident.pause_s, 3),
        "is_over": incident.is_over,
        "nodes": list(incident.nodes),
        "recomputed_s": round(incident.recomputed_s, 3),
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


def _facts_document(found: Sequence[Any]) -> list[dict[str, Any]]:
    return [{("time" if k == "at_s" else k): v for k, v in asdict(one).items()} for one in found]


def _seconds(breakdown: Breakdown) -> dict[str, float]:
    return {a.value: round(s, 3) for a in Activity if (s := breakdown.seconds.get(a, 0.0)) > 0}


# ----------------------------------------------------------------------------
# Templates: one page for the report and the live dashboard, and the same as Markdown.
#
# Everything is escaped by the template engine. Untrusted texts (names, reasons, tracebacks) also
# pass a filter that shortens them and makes them printable. A page that would be longer than
# ``MAX_BYTES`` is created again with fewer rows and shorter texts.

MAX_BYTES = 250_000
_TEMPLATES = Path(__file__).parent / "templates"
_MAX_NAMES = 12
_CURVE_ROWS = 24  # of a curve's table
_MAX_LINES = 30  # of a traceback: its last ones
_MARKUP = str.maketrans({character: f"\\{character}" for character in "\\|<>[]`*_"})


@dataclass(frozen=True)
class _Size:
    """How much of everything a page shows."""

    rows: int = 40
    text: float = 1.0  # the share of a text's usual length


_SIZES = (_Size(), _Size(20, 0.5), _Size(10, 0.3), _Size(5, 0.2), _Size(2, 0.1))


def html(report: RunReport) -> str:
    """The report as one file: no network, no script."""
    return page(report, None, title=_name_of_run(report.run_id))


def page(report: RunReport | None, live: Mapping[str, Any] | None, *, title: str) -> str:
    """The page of a report, of a live job (``live``: what the template shows of it), or both."""
    drawn = _drawn(report) if report is not None else {}
    text = ""
    for size in _SIZES:
        context = _context(report, size) if report is not None else {}
        template = _environment(size).get_template("page.html")
        text = template.render(
            title=title,
            style=style(),
            script=script(),
            report=report,
            live=live,
            **context,
            **drawn,
        )
        if len(text.encode()) <= MAX_BYTES:
            break
    return text


def markdown(report: RunReport) -> Iterator[str]:
    """The output of ``-o md``, line by line."""
    template = _environment(_SIZES[0]).get_template("report.md")
    title = _name_of_run(report.run_id)
    yield from template.render(report=report, title=title).strip().splitlines()


@cache
def style() -> str:
    """The style sheet of all pages: a server's policy names its hash."""
    swatches = "".join(f".{name}{{background:var(--{name})}}" for name in map(name_of, Activity))
    return variables(":root") + swatches + (_TEMPLATES / "style.css").read_text("utf-8")


@cache
def script() -> str:
    """The script of live pages."""
    return (_TEMPLATES / "live.js").read_text("utf-8")


def svg(chart: Chart) -> str:
    """The chart as an SVG element."""
    return _environment(_SIZES[0]).get_template("chart.svg").render(chart=chart)


def _name_of_run(run_id: str) -> str:
    return f"Run {printable(run_id, 80)}" if run_id else "Run without a name"


def _drawn(report: RunReport) -> dict[str, Any]:
    curves = [
        (
            curve,
            curve_chart(curve, report.marks, name=f"curve-{number}"),
            thinned(list(zip(curve.steps, curve.values, strict=True)), _CURVE_ROWS),
        )
        for number, curve in enumerate(report.curves)
    ]
    return {
        "timeline": timeline_chart(report.timeline),
        "breakdown": breakdown_chart(report.goodput.breakdown),
        "curves": curves,
    }


class Rows(list[Any]):
    """The first of many, and how many more there are."""

    def __init__(self, items: Sequence[Any], most: int) -> None:
        super().__init__(items[:most])
        self.hidden = max(0, len(items) - most)


def _context(report: RunReport, size: _Size) -> dict[str, Any]:
    rows = partial(Rows, most=size.rows)
    findings = report.findings
    worst = sorted(report.incidents, key=lambda i: -i.cost_s)[: size.rows]
    incidents = Rows([i for i in report.incidents if i in worst], size.rows)
    incidents.hidden = len(report.incidents) - len(incidents)
    return {
        **_headline(report),
        "facts": list(facts_of(report)),
        "sections": list(_sections(report)),
        "legend": [(name_of(a), a.value) for a in report.timeline.activities],
        "marks": rows(report.marks),
        "parts": parts_of_time(report.goodput.breakdown),
        "nodes": rows(sorted(report.goodput.nodes, key=lambda n: n.breakdown.goodput)),
        "incidents": incidents,
        "recomputed": any(i.recomputed_s for i in incidents),
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


def facts_of(report: RunReport) -> Iterator[tuple[str, str]]:
    """The tiles of a report: names and values."""
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
    yield from (("incidents", "Incidents"), ("verdicts", "Verdicts and hangs"))
    yield from (("timeline", "Timeline"), ("time", "Where the time went"))
    if report.curves:
        yield "curves", "Loss" if report.curves[0].name == "loss" else "Metrics"
    yield "checkpoints", "Checkpoints"


def _checkpoint_sentence(report: RunReport) -> str:
    history = report.checkpoints
    last = history.last
    if last is None:
        return "No checkpoint was committed."
    mean_s = sum(saved.duration_s for saved in history.saved) / len(history.saved)
    age_s = max(0.0, report.goodput.end_s - last.at_s)
    stall_s = report.goodput.breakdown.seconds.get(Activity.CHECKPOINT, 0.0)
    return (
        f"{counted(len(history.saved), 'checkpoint')} committed, {duration(mean_s)} each on "
        f"average; training waited {duration(stall_s)} for them. The last one, "
        f"{printable(last.name, 80)} of step {last.step}, is {duration(age_s)} older than the end "
        "of the journals."
    )


def _happened(incident: IncidentReport) -> str:
    """The reason and, if a worker raised one that is not in it, the first error."""
    for node, text in incident.errors[:1]:
        if (error := exception_line(text)) not in incident.reason:
            return f"{incident.reason}; {node}: {error}"
    return incident.reason


# Filters -----------------------------------------------------------------------------------------


@cache
def _environment(size: _Size) -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=lambda name: name is None or not name.endswith(".md"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "text": partial(_text, size),
        "lines": partial(_lines, size),
        "names": partial(_names, size),
        "cell": lambda text, limit=200: printable(str(text), limit).translate(_MARKUP),
        "utc": timestamp,
        "age": age,
        "took": lambda seconds: duration(max(0.0, seconds)),
        "percent": lambda share: f"{share:.1%}",
        "value": lambda number: f"{number:.6g}",
        "px": lambda number: f"{number:.1f}".removesuffix(".0"),
        "largest": largest,
        "happened": _happened,
        "parts_of_time": parts_of_time,
        "counted": counted,
    }
    return environment


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


def age(seconds: float) -> str:
    """Whole units, as the page's script writes them.

    >>> [age(s) for s in (-3, 12.9, 75, 3700, 200000)]
    ['0 s ago', '12 s ago', '1 min 15 s ago', '1 h 1 min ago', '2 d 7 h ago']
    """
    whole = max(0, int(seconds))
    return f"{whole} s ago" if whole < 60 else f"{duration(float(whole))} ago"


def largest(losses: Sequence[tuple[Activity, float]], count: int) -> str:
    """The ``count`` largest, such as ``rebuild 119 ms, abort 20 ms``.

    >>> largest([(Activity.ABORT, 0.02), (Activity.REBUILD, 0.119)], 1)
    'rebuild 119 ms'
    """
    ordered = sorted(losses, key=lambda pair: -pair[1])[:count]
    return ", ".join(f"{a.value} {duration(s)}" for a, s in ordered if s >= 0.0005)
