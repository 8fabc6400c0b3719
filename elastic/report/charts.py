"""The charts of a run as SVG, drawn by matplotlib (the extra ``report``).

Each function takes facts and returns one ``<svg>`` element that follows the reader's light or dark
theme, with a title and a description for screen readers. ``name`` is the prefix of its ids: two
charts of a kind on one page need different names. Thread-safe.
"""

from __future__ import annotations

import importlib.util
import io
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from elastic.errors import ConfigError
from elastic.report.curves import Curve
from elastic.report.palette import light, name_of
from elastic.report.svg import adapt
from elastic.report.timeline import GenerationMark, NodeLane, Timeline
from elastic.telemetry.activities import Activity, Breakdown
from elastic.telemetry.printable import duration, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
