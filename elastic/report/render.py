"""The report of a job as text, Markdown and HTML."""

from __future__ import annotations

import importlib.util
import io
import re
import threading
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elastic.errors import ConfigError
from elastic.report.model import (
    Curve,
    GenerationMark,
    IncidentReport,
    NodeLane,
    RunReport,
    Timeline,
    counted,
    thinned,
)
from elastic.telemetry.goodput import Activity, Breakdown
from elastic.telemetry.log import duration, printable, timestamp

if TYPE_CHECKING:
    from jinja2 import Template
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# ----------------------------------------------------------------------------
# Colours of charts and pages, each for a light and a dark background, as CSS variables.
#
# Contrast is at least 3:1 against the background, for texts 4.5:1 (WCAG 2.1). Charts do not rely
# on colour alone: a table next to each contains the same information.

# name: (light, dark). The light ones are distinct: a chart is drawn in them, and they are replaced.
COLOURS: Mapping[str, tuple[str, str]] = {
    "ink": ("#1f2328", "#e6edf3"),
    "muted": ("#59636e", "#9198a1"),
    "line": ("#d1d9e0", "#3d444d"),
    "paper": ("#ffffff", "#0d1117"),
    "panel": ("#f6f8fa", "#151b23"),
    "link": ("#0969da", "#4493f8"),
    "good": ("#1a7f37", "#3fb950"),
    "bad": ("#d1242f", "#f85149"),
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


def light(name: str) -> str:
    """The colour that charts are drawn in."""
    return COLOURS[name][0]


def variables(selector: str, names: Iterable[str] = tuple(COLOURS)) -> str:
    """CSS: colours for ``selector``, by the reader's theme."""
    chosen = {name: COLOURS[name] for name in names}
    themes = [
        "".join(f"--{name}:{pair[theme]};" for name, pair in chosen.items()) for theme in (0, 1)
    ]
    return (
        f"{selector}{{{themes[0]}}}@media(prefers-color-scheme:dark){{{selector}{{{themes[1]}}}}}"
    )


# ----------------------------------------------------------------------------
# SVG by matplotlib adapted for a page: themed, accessible, small, and without id conflicts.
#
# Colours become CSS variables that follow the reader's theme, in the page and in a separate file.
# A chart has a title and a description for screen readers, and only ids that it refers to.

CHART_CLASS = "elastic-chart"
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"

_SVG = "http://www.w3.org/2000/svg"
_XLINK = "{http://www.w3.org/1999/xlink}href"
_VARIABLES = {light: name for name, (light, _) in COLOURS.items()}
_COLOUR = re.compile(r"#[0-9a-f]{6}")
_LONG_NUMBER = re.compile(r"(-?\d+\.\d)\d+")
_FONT = re.compile(r"font: (?:([\w ]+) )?([\d.]+)px [^;]*")  # matplotlib before 3.11
_FAMILY = re.compile(r"font-family: [^;]*;? ?")
_NO_ROTATION = re.compile(r"rotate\(-?0(?:\.0)? [^)]*\)")
_NAME = re.compile(r"var\(--([\w-]+),")
_REFERENCE = re.compile(r"#([\w-]+)")
_DROPPED = {f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"}


def adapt(raw: str, *, name: str, title: str, description: str) -> str:
    """matplotlib's output as an element for a page, or a separate file. ``name``, the prefix of its
    ids, is unique on a page."""
    root = ET.fromstring(raw)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in _DROPPED:
                parent.remove(child)
    used = {match for element in root.iter() for match in _references(element)}
    for element in root.iter():
        _clean(element, used, name)
    _flatten(root)
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    root.set("class", CHART_CLASS)
    root.set("style", "background:var(--paper,#ffffff)")
    root.set("role", "img")
    root.set("aria-labelledby", f"{name}-title {name}-description")
    style = ET.Element("style")
    style.text = _styles(root)
    heads = (("title", title), ("desc", description))
    for place, (tag, text) in enumerate(heads):
        head = ET.Element(tag, {"id": f"{name}-{'title' if tag == 'title' else 'description'}"})
        head.text = text
        root.insert(place, head)
    root.insert(2, style)
    for element in root.iter():
        element.tag = element.tag.replace(f"{{{_SVG}}}", "")
    root.set("xmlns", _SVG)
    return ET.tostring(root, encoding="unicode")


def _styles(root: ET.Element) -> str:
    used = {name for e in root.iter() for name in _NAME.findall(e.get("style", ""))}
    own = variables(f".{CHART_CLASS}", [name for name in COLOURS if name in used])
    return f"{own}.{CHART_CLASS} text{{font-family:{FONT}}}"


def _references(element: ET.Element) -> list[str]:
    texts = [v for k, v in element.attrib.items() if k != "id" and "#" in v]
    return [match for text in texts for match in _REFERENCE.findall(text)]


def _clean(element: ET.Element, used: set[str], name: str) -> None:
    attributes = element.attrib
    own = attributes.pop("id", None)
    if own in used:
        attributes["id"] = f"{name}-{own}"
    if (target := attributes.pop(_XLINK, None)) is not None:
        attributes["href"] = f"#{name}-{target[1:]}"
    if "clip-path" in attributes:
        attributes["clip-path"] = attributes["clip-path"].replace("#", f"#{name}-")
    for key in ("d", "x", "y", "transform"):
        if key in attributes:
            attributes[key] = " ".join(_LONG_NUMBER.sub(r"\1", attributes[key]).split())
    if "style" in attributes:
        style = _FAMILY.sub("", _FONT.sub(_font, attributes["style"]))
        style = _COLOUR.sub(_variable, style).replace("stroke-linecap: square", "")
        attributes["style"] = style.replace(": ", ":").replace("; ", ";").strip("; ")
    if not _NO_ROTATION.sub("", attributes.get("transform", "-")).strip():
        del attributes["transform"]
    if element.text is not None and not element.text.strip():
        element.text = None
    if element.tail is not None and not element.tail.strip():
        element.tail = None


def _variable(match: re.Match[str]) -> str:
    name = _VARIABLES.get(match[0])
    return match[0] if name is None else f"var(--{name},{match[0]})"


def _font(match: re.Match[str]) -> str:
    weight = f";font-weight:{match[1]}" if match[1] else ""
    return f"font-size:{match[2]}px{weight}"


def _flatten(element: ET.Element) -> None:
    """Remove groups without attributes, which are redundant."""
    flat = []
    for child in element:
        _flatten(child)
        is_bare = child.tag == f"{{{_SVG}}}g" and not child.attrib
        flat += list(child) if is_bare else [child]
    element[:] = flat


# ----------------------------------------------------------------------------
# The charts of a run as SVG, drawn by matplotlib (the extra ``report``).
#
# Each function takes facts and returns one ``<svg>`` element that follows the reader's light or
# dark theme, with a title and a description for screen readers. ``name`` is the prefix of its ids:
# two charts of a kind on one page need different names. Thread-safe.

WIDTH = 960  # of every chart, in pixels
_LEFT, _RIGHT = 128, 20  # beside the axes
_LANE = 30
_LABEL_ROWS = 3  # of generations above a timeline
_LABEL_ROW = 16
_CHARACTER = 6.8  # width of one in a label, about
_MAX_MARKS = 80  # lines of generations in one chart
_LONGEST_NAME = 18
_SMALL, _NORMAL = 11, 12
# Between two ticks of a time axis, in seconds.
_TICKS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800),
)
# Matplotlib's state is global, and so are these settings while a chart is drawn.
_lock = threading.Lock()


def can_draw() -> bool:
    """Whether matplotlib is installed. Imports nothing."""
    return importlib.util.find_spec("matplotlib") is not None


def require_matplotlib() -> None:
    """Raise ConfigError if it is missing."""
    if not can_draw():
        raise ConfigError(
            "the HTML report draws its charts with matplotlib, which is not installed",
            hint="pip install 'torch-elastic-harness[report]'; --format=md and --format=json do "
            "not need it",
        )


# Timeline ----------------------------------------------------------------------------------------


def timeline_svg(timeline: Timeline, *, name: str = "timeline") -> str:
    """A lane for each node, coloured by activity, and a line for each generation."""
    lanes = timeline.lanes
    length_s = max(1e-6, timeline.end_s - timeline.start_s)
    top, bottom = _LABEL_ROWS * _LABEL_ROW + 8, 34
    height = top + _LANE * max(1, len(lanes)) + bottom
    with _figure(height) as figure:
        axes = _axes(figure, height, top, bottom)
        axes.set_xlim(0, length_s)
        axes.set_ylim(len(lanes) or 1, 0)
        _draw_lanes(axes, timeline)
        _time_ticks(axes, length_s)
        axes.set_yticks(
            [i + 0.5 for i in range(len(lanes))],
            lane_labels([lane.node for lane in lanes]),
        )
        marks = [(m.at_s - timeline.start_s, m.label) for m in timeline.marks]
        _draw_marks(axes, marks, length_s, height - top - bottom)
        return _finish(
            figure,
            name=name,
            title="Timeline of the nodes",
            description=_described_timeline(timeline),
        )


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


def _draw_lanes(axes: Axes, timeline: Timeline) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    for activity in timeline.activities:
        # A thick line takes a third of the bytes of a rectangle.
        ends = [
            (at_s - timeline.start_s, row + 0.5)
            for row, lane in enumerate(timeline.lanes)
            for s in lane.segments
            if s.activity is activity
            for at_s in (s.start_s, s.end_s)
        ]
        path = Path(ends, [Path.MOVETO, Path.LINETO] * (len(ends) // 2))
        lines = PathPatch(
            path,
            fill=False,
            edgecolor=light(name_of(activity)),
            linewidth=0.72 * _LANE,
            capstyle="butt",
            snap=False,
        )
        axes.add_patch(lines)


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


def breakdown_svg(breakdown: Breakdown, *, name: str = "breakdown") -> str:
    """Where the time went: one bar for all of it, and one for each kind of loss."""
    total_s = breakdown.total_s or 1.0
    losses = breakdown.losses
    row = 24
    top, bottom, gap = 26, 10, 18
    height = top + row + gap + row * max(1, len(losses)) + bottom
    with _figure(height) as figure:
        whole = _axes(figure, height, top, height - top - row)
        left_s = 0.0
        for activity, took_s in ((Activity.PRODUCTIVE, _productive(breakdown)), *losses):
            whole.barh(0, took_s, left=left_s, height=0.8, color=light(name_of(activity)))
            left_s += took_s
        whole.set_xlim(0, total_s)
        whole.set_xticks([])
        whole.set_yticks([0], ["all time"])
        whole.set_title(
            f"{breakdown.goodput:.1%} productive", fontsize=_NORMAL, color=light("ink"), loc="left"
        )
        each = _axes(figure, height, top + row + gap, bottom)
        _draw_losses(each, losses, total_s)
        return _finish(
            figure,
            name=name,
            title="Where the time went",
            description=_described_breakdown(breakdown),
        )


def _productive(breakdown: Breakdown) -> float:
    return breakdown.seconds.get(Activity.PRODUCTIVE, 0.0)


def _draw_losses(axes: Axes, losses: Sequence[tuple[Activity, float]], total_s: float) -> None:
    axes.set_xticks([])
    if not losses:
        axes.set_yticks([0.5], ["no losses"])
        return
    longest_s = losses[0][1]
    axes.set_xlim(0, longest_s * 1.25)  # room for the numbers
    axes.set_ylim(len(losses) - 0.5, -0.5)
    axes.set_yticks(range(len(losses)), [activity.value for activity, _ in losses])
    for place, (activity, took_s) in enumerate(losses):
        axes.barh(place, took_s, height=0.7, color=light(name_of(activity)))
        axes.text(
            took_s + longest_s * 0.01,
            place,
            f"{duration(took_s)} ({took_s / total_s:.1%})",
            va="center",
            fontsize=_SMALL,
            color=light("ink"),
        )


def _described_breakdown(breakdown: Breakdown) -> str:
    total_s = breakdown.total_s or 1.0
    sentences = [f"{breakdown.goodput:.1%} of {duration(breakdown.total_s)} productive."]
    sentences += [
        f"{activity.value} {duration(took_s)}, {took_s / total_s:.1%}."
        for activity, took_s in breakdown.losses
    ]
    return " ".join(sentences)


# Curves ------------------------------------------------------------------------------------------


def curve_svg(curve: Curve, marks: Sequence[GenerationMark] = (), *, name: str = "curve") -> str:
    """One quantity over steps, with a line where a generation began to train."""
    top, bottom, inner = _LABEL_ROWS * _LABEL_ROW + 8, 40, 190
    height = top + inner + bottom
    with _figure(height) as figure:
        axes = _axes(figure, height, top, bottom)
        first, last = curve.steps[0], curve.steps[-1]
        length = max(1, last - first)
        dot = "o" if len(curve.steps) == 1 else ""
        axes.plot(curve.steps, curve.values, color=light("link"), linewidth=1.6, marker=dot)
        axes.set_xlim(first, first + length)
        axes.margins(y=0.08)
        axes.set_xlabel("step", fontsize=_SMALL, color=light("muted"))
        axes.set_ylabel(
            printable(curve.name, 30), fontsize=_SMALL, color=light("muted"), labelpad=10
        )
        axes.ticklabel_format(axis="x", style="plain", useOffset=False)
        axes.grid(axis="y", color=light("line"), linewidth=0.8)
        shown = [m for m in marks if m.step is not None and first <= m.step <= last]
        _draw_marks(axes, [((m.step or 0) - first, m.label) for m in shown], length, inner, first)
        return _finish(
            figure,
            name=name,
            title=f"{printable(curve.name, 60)} by step",
            description=_described_curve(curve, shown),
        )


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


# Common parts of all charts ----------------------------------------------------------------------


@contextmanager
def _figure(height: int) -> Iterator[Figure]:
    """An empty figure, with settings that no matplotlibrc changes. Raises ConfigError."""
    require_matplotlib()
    with _lock:
        import matplotlib
        from matplotlib.figure import Figure

        settings = {
            **{k: v for k, v in matplotlib.rcParamsDefault.items() if k not in _UNTOUCHED},
            "svg.fonttype": "none",  # text remains text
            "svg.hashsalt": "elastic",
            "text.parse_math": False,  # a node may be called $x$
            "path.simplify": True,
        }
        with matplotlib.rc_context(settings):
            yield Figure(figsize=(WIDTH / 72, height / 72), dpi=72)


_UNTOUCHED = frozenset({"backend", "backend_fallback", "interactive", "toolbar", "timezone"})


def _axes(figure: Figure, height: int, top: int, bottom: int) -> Axes:
    """Add axes with margins in pixels."""
    axes = figure.add_axes(
        (
            _LEFT / WIDTH,
            bottom / height,
            (WIDTH - _LEFT - _RIGHT) / WIDTH,
            (height - top - bottom) / height,
        )
    )
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(side == "bottom")
        axes.spines[side].set_color(light("line"))
    axes.tick_params(length=0, labelsize=_SMALL, labelcolor=light("ink"))
    axes.patch.set_visible(False)
    return axes


def _time_ticks(axes: Axes, length_s: float) -> None:
    every_s = next((s for s in _TICKS if length_s / s <= 10), length_s / 8)
    ticks = [i * every_s for i in range(int(length_s / every_s) + 1)]
    axes.set_xticks(ticks, [_tick(s) for s in ticks])
    axes.grid(axis="x", color=light("line"), linewidth=0.8)
    axes.set_axisbelow(True)


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


def _draw_marks(
    axes: Axes,
    marks: Sequence[tuple[float, str]],
    length: float,
    inner: int,
    first: float = 0.0,
) -> None:
    """Vertical lines with labels above, in rows that avoid overlap; without room, no label."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    per_pixel = length / (WIDTH - _LEFT - _RIGHT)
    lines: list[tuple[float, float]] = []
    ends = [float("-inf")] * _LABEL_ROWS  # of the last label of each row, in pixels
    for at, text in marks[:: max(1, -(-len(marks) // _MAX_MARKS))]:
        shown = printable(text, 24)
        x = at / per_pixel
        width = len(shown) * _CHARACTER
        begin = min(x - 3, WIDTH - _LEFT - width)
        row = next((r for r, end in enumerate(ends) if begin > end), None)
        top = 1 + (6 + (row or 0) * _LABEL_ROW) / inner
        lines += [(first + at, 0), (first + at, top)]
        if row is None:
            continue
        ends[row] = begin + width + 6
        axes.text(
            first + begin * per_pixel,
            top,
            shown,
            transform=axes.get_xaxis_transform(),
            va="bottom",
            fontsize=_SMALL,
            color=light("ink"),
        )
    path = Path(lines or [(first, 0)], [Path.MOVETO, Path.LINETO] * (len(lines) // 2) or None)
    style = {"edgecolor": light("ink"), "linestyle": (0, (3, 2)), "linewidth": 1}
    axes.add_artist(
        PathPatch(path, fill=False, transform=axes.get_xaxis_transform(), clip_on=False, **style)
    )


def _finish(figure: Figure, *, name: str, title: str, description: str) -> str:
    import warnings

    figure.patch.set_visible(False)
    raw = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a glyph that is missing: the reader's font may have it
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(raw, format="svg", metadata=metadata)
    return adapt(raw.getvalue().decode(), name=name, title=title, description=description)


# ----------------------------------------------------------------------------
# A run's report for programs: ``elastic report --format json``.

SCHEMA = 2  # incremented when a field changes its meaning or is removed


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
# A run's report for terminals, chats and issues: ``elastic report --format md``.


def markdown(report: RunReport) -> Iterator[str]:
    """The output of ``--format md``, line by line."""
    goodput = report.goodput
    yield f"# Run {_cell(goodput.run_id or 'without a name')}"
    yield ""
    yield _cell(report.sentence, 1000)
    yield ""
    yield (
        f"{timestamp(goodput.start_s)} to {timestamp(goodput.end_s)}, "
        f"{duration(goodput.duration_s)}: {goodput.breakdown.goodput:.1%} of the time made "
        f"progress. {counted(goodput.steps, 'step')}, {goodput.recomputed_steps:,} of them "
        "recomputed; "
        f"{counted(len(goodput.incidents), 'change')} of the world."
    )
    yield ""
    yield from _breakdown(goodput.breakdown, goodput.duration_s)
    yield from _section(
        "Nodes",
        "| node | present for | productive | largest losses |",
        "|---|---:|---:|---|",
        (
            f"| {_cell(node.node)} | {duration(node.end_s - node.start_s)} | "
            f"{node.breakdown.goodput:.1%} | {_losses_markdown(node.breakdown)} |"
            for node in goodput.nodes
        ),
    )
    yield from _incidents(report)
    yield from _findings(report)
    if report.notes:
        yield "## Notes"
        yield ""
        yield from (f"- {_cell(note, 1000)}" for note in report.notes)


def _breakdown(breakdown: Breakdown, duration_s: float) -> Iterator[str]:
    productive_s = breakdown.seconds.get(Activity.PRODUCTIVE, 0.0)
    return _section(
        "Where the time went",
        "| part | time | share |",
        "|---|---:|---:|",
        (
            f"| {activity.value} | {duration(took_s)} | {took_s / duration_s:.1%} |"
            for activity, took_s in ((Activity.PRODUCTIVE, productive_s), *breakdown.losses)
        )
        if duration_s > 0
        else (),
    )


def _incidents(report: RunReport) -> Iterator[str]:
    yield from _section(
        "Changes of the world",
        "| at | generation | reason | pause | recomputed | where the pause went |",
        "|---|---|---|---:|---:|---|",
        (
            f"| {timestamp(i.at_s)} | {', '.join(map(str, i.generations))} | "
            f"{_cell(_happened(i))} | {duration(i.pause_s)} | "
            f"{duration(i.recomputed_s) if i.recomputed_s else ''} | {_largest(i.phases, 6)} |"
            for i in report.incidents
        ),
    )
    yield from _section(
        "Checkpoints at failures",
        "| generation | last checkpoint | age | steps since |",
        "|---|---|---:|---:|",
        (
            f"| {i.generations[0] - 1} | {_cell(i.checkpoint.name) if i.checkpoint else 'none'} | "
            f"{duration(i.checkpoint_age_s) if i.checkpoint_age_s is not None else ''} | "
            f"{i.steps_at_risk if i.steps_at_risk is not None else ''} |"
            for i in report.failures
        ),
    )


def _happened(incident: IncidentReport) -> str:
    """The reason and, if a worker raised one, the first error."""
    if not incident.errors:
        return incident.reason
    node, error = incident.errors[0]
    return f"{incident.reason}; {node}: {error.strip().splitlines()[-1]}"


def _findings(report: RunReport) -> Iterator[str]:
    found = report.findings
    yield from _section(
        "Verdicts on failures",
        "| at | generation | node | action | rule | reason |",
        "|---|---|---|---|---|---|",
        (
            f"| {timestamp(v.at_s)} | {_known(v.generation)} | {_cell(v.failed)} | "
            f"{_cell(v.action)} | {_cell(v.rule)} | {_cell(v.reason)} |"
            for v in found.verdicts
        ),
    )
    yield from _section(
        "Hangs",
        "| at | generation | kind | ranks | reason | report |",
        "|---|---|---|---|---|---|",
        (
            f"| {timestamp(h.at_s)} | {_known(h.generation)} | {_cell(h.kind)} | "
            f"{', '.join(map(str, h.ranks[:16]))} | {_cell(h.reason)} | {_cell(h.report)} |"
            for h in found.hangs
        ),
    )
    yield from _section(
        "Stragglers",
        "| at | rank | node | cause | reason |",
        "|---|---|---|---|---|",
        (
            f"| {timestamp(s.at_s)} | {_known(s.rank)} | {_cell(s.node)} | {_cell(s.cause)} | "
            f"{_cell(s.reason)} |"
            for s in found.stragglers
        ),
    )


def _section(title: str, head: str, rule: str, rows: Iterable[str]) -> Iterator[str]:
    """A table with a title; nothing without rows."""
    shown = list(rows)
    if shown:
        yield from (f"## {title}", "", head, rule, *shown, "")


def _losses_markdown(breakdown: Breakdown) -> str:
    return _largest(breakdown.losses, 3)


def _largest(losses: Sequence[tuple[Activity, float]], count: int) -> str:
    ordered = sorted(losses, key=lambda pair: -pair[1])[:count]
    return ", ".join(f"{a.value} {duration(s)}" for a, s in ordered if s >= 0.0005)


def _known(number: int | None) -> str:
    return "" if number is None else str(number)


def _cell(text: str, limit: int = 200) -> str:
    """Untrusted text, escaped so that it adds no markup and no cells."""
    shown = printable(text, limit)
    for character in "\\|<>[]`*_":
        shown = shown.replace(character, f"\\{character}")
    return shown


# ----------------------------------------------------------------------------
# A run's report as one HTML file: no network, no script, at most ``MAX_BYTES`` long.
#
# Untrusted text (names, reasons, tracebacks) is shortened, made printable and escaped. A page that
# would be too long is created again with fewer rows and shorter texts.

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
        "facts": list(_facts_page(report)),
        "sections": list(_sections(report)),
        "timeline_svg": Markup(charts.timeline),
        "breakdown_svg": Markup(charts.breakdown),
        "legend": [(name_of(a), a.value) for a in report.timeline.activities],
        "marks": rows(report.marks),
        "parts": list(_parts(goodput.breakdown)),
        "nodes": rows(sorted(goodput.nodes, key=lambda n: n.breakdown.goodput)),
        "curves": [_DrawnCurve(d.curve, Markup(d.svg), d.rows) for d in charts.curves],
        "incidents": incidents,
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


def _facts_page(report: RunReport) -> Iterator[tuple[str, str]]:
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
    stall_s = report.goodput.breakdown.seconds.get(Activity.CHECKPOINT, 0.0)
    return (
        f"{counted(len(history.saved), 'checkpoint')} committed, {duration(mean_s)} each on "
        f"average; training waited {duration(stall_s)} for them. The last one, "
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
        "largest": _largest,
        "happened": _happened,
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
