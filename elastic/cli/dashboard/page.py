"""A snapshot as HTML: sections that are resent when they change, and the page around them.

Pure. All untrusted text (names, errors) passes through :func:`text`, and nothing else does.
"""

from __future__ import annotations

import hashlib
import html
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from string import Template

from elastic.cli.dashboard.feed.snapshot import JobEvent, JobSnapshot
from elastic.cli.observe.job_view import JobCondition, JobView
from elastic.cli.observe.printable import duration, printable, timestamp
from elastic.cli.observe.sentence import incident, sentence
from elastic.cli.observe.status import ranks_of
from elastic.membership.records import BreakageRecord, Node

MAX_NODES = 100  # rows; a page is 250 kB at most
_MAX_EVENTS = 50
_MAX_INCIDENTS = 10
_TEMPLATE = Path(__file__).with_name("page.html")
_AGE = re.compile(r"(<time [^>]*>)[^<]*")
_CELL = re.compile(r'(<td id="[^>]*>).*?(?=</td>)')
_TIME = re.compile(r"⟦(\d{1,12}\.\d{3})⟧")
_BLOCK = "<{0}>(.*?)</{0}>"

# In the order of the page. Resent parts are found by these ids, and by the ids of cells that
# change with every heartbeat: the table is not resent for them, so a reader's selection is kept.
SECTIONS = (
    *("headline", "outage", "facts", "nodes", "incidents", "timeline", "breakdown", "curves"),
    *("events", "notes"),
)


def text(value: object, limit: int = 200) -> str:
    """Any value as page text: shortened, escaped, without control characters. If escaping makes
    it long, it is shortened further, to at most about twice ``limit`` characters.

    >>> text("<b>\\x1b")
    '&lt;b&gt;\\\\x1b'
    """
    plain = str(value)
    escaped = html.escape(printable(plain, limit))
    return escaped if len(escaped) <= 2 * limit else html.escape(printable(plain, limit // 5))


def sections_of(snapshot: JobSnapshot) -> dict[str, str]:
    """The content of each section and of each cell with an id, by the id."""
    view, now_s = snapshot.view, snapshot.at_s
    found = {
        "headline": _headline(snapshot),
        "outage": _outage(snapshot),
        "facts": _facts(snapshot),
        "nodes": _nodes(view, now_s) if view is not None else "",
        "incidents": _incidents(view, now_s) if view is not None else "",
        **_charts(snapshot),
        "events": _events(snapshot.events, now_s),
        "notes": _notes([*snapshot.notes, *(view.notes if view is not None else ())]),
    }
    cells = _cells(view, now_s) if view is not None else {}
    return {**{name: found[name] for name in SECTIONS}, **cells}


def lasting(section: str) -> str:
    """The part of the HTML that decides whether it is resent, without ages: the page counts those
    itself, and cells with an id are sent separately."""
    return _AGE.sub(r"\1", _CELL.sub(r"\1", section))


# The parts of the page ---------------------------------------------------------------------------


def _headline(snapshot: JobSnapshot) -> str:
    state, view = snapshot.state, snapshot.view
    shown = _sentence(view, snapshot.at_s) if view is not None else _before_etcd(snapshot)
    generation = view.world.generation if view is not None and view.world is not None else None
    spoken = state if generation is None else f"{state}, generation {generation}"
    title = f"{state} · {printable(snapshot.run_id, 60)}"
    is_good = state in _GOOD and not snapshot.is_stale
    mood = "bad" if snapshot.needs_attention else ("good" if is_good else "plain")
    return (
        f'<p class="state" data-title="{html.escape(title)}" data-spoken="{text(spoken)}">'
        f'<span class="badge {mood}" aria-hidden="true"></span> {shown}</p>'
    )


_GOOD = frozenset({"training", "succeeded"})


def _sentence(view: JobView, now_s: float) -> str:
    """The status sentence, with its ages as elements that the page updates itself."""
    escaped = html.escape(sentence(view, lambda at_s: f"⟦{at_s:.3f}⟧"))
    return _TIME.sub(lambda match: _age(float(match[1]), now_s), escaped)


def _before_etcd(snapshot: JobSnapshot) -> str:
    if not snapshot.uses_etcd:
        return "from the journals only: etcd is not used"
    return "etcd has not answered yet"


def _outage(snapshot: JobSnapshot) -> str:
    if snapshot.outage is None:
        return ""
    view = snapshot.view
    shown = "".join(f"{text(line, 400)}<br>" for line in snapshot.last_known)
    if view is not None:
        shown = f"This page shows the state of {_age(view.at_s, snapshot.at_s)}.<br>{shown}"
    return (
        f'<div class="outage"><strong>etcd does not answer</strong>, or denies access, since '
        f"{_clock_time(snapshot.outage.since_s)}: {text(snapshot.outage.reason, 400)}<br>{shown}"
        "</div>"
    )


def _facts(snapshot: JobSnapshot) -> str:
    pairs = list(_fact_pairs(snapshot))
    if not pairs:
        return ""
    cells = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in pairs)
    return f"<dl>{cells}</dl>"


def _fact_pairs(snapshot: JobSnapshot) -> Iterator[tuple[str, str]]:
    view = snapshot.view
    progress = view.progress if view is not None else None
    if view is not None and view.step is not None:
        planned = progress.planned_steps if progress is not None else None
        or_later = " or later" if view.is_step_old else ""
        yield "Step", _step(view.step, planned) + or_later
    if view is not None and (rate := view.steps_per_s) is not None:
        yield "Rate", f"{rate:.3g} steps/s"
    if view is not None and (eta_s := view.eta_s) is not None:
        yield "Time left", f"about {text(duration(eta_s))}"
    elif view is not None and view.state is JobCondition.TRAINING:
        yield "Time left", "unknown"
    yield from _goodput(snapshot)
    if view is not None and progress is not None and progress.checkpoint_step is not None:
        at_s = progress.checkpoint_at_s
        ago = f", {_age(at_s, snapshot.at_s)}" if at_s is not None else ""
        yield "Last checkpoint", f"step {progress.checkpoint_step}{ago}"
    if view is not None and view.world is not None:
        world = view.world
        yield "Generation", f"{world.generation}, {_age(world.time_s, snapshot.at_s)}"
        allowed = f"{world.min_nodes} to {world.max_nodes} allowed"
        yield "Nodes", f"{len(view.training)} ({allowed})"
        yield "Workers", f"{world.size}"
        yield "Last change", text(world.reason)


def _step(step: int, planned: int | None) -> str:
    if planned is None:
        return f"{step}"
    return (
        f'{step} of {planned} <progress aria-label="steps committed" value="{min(step, planned)}" '
        f'max="{max(planned, 1)}"></progress>'
    )


def _goodput(snapshot: JobSnapshot) -> Iterator[tuple[str, str]]:
    """Goodput from the journals, which have more detail than the leader's estimate."""
    charts, view = snapshot.charts, snapshot.view
    if charts is not None and charts.goodput is not None:
        covers = duration(charts.goodput_of_s)
        yield "Goodput", f"{charts.goodput:.1%} of {text(covers)}, from the journals"
    elif view is not None and (goodput := view.goodput) is not None:
        since_s = (view.progress.goodput_since_s if view.progress else None) or view.at_s
        covers = duration(max(0.0, view.at_s - since_s))
        yield "Goodput", f"{goodput:.1%} of {text(covers)}, an estimate"


def _nodes(view: JobView, now_s: float) -> str:
    nodes = [*view.members, *view.joining]
    if not nodes:
        return "<p>No node is alive.</p>"
    heads = ["Node", "Ranks", "State", "*Generation", "*Step", "Heartbeat", "Joined", "*Address"]
    shown = enumerate(nodes[:MAX_NODES])
    rows = "".join(_node(view, node, row, now_s) for row, node in shown)
    more = len(nodes) - MAX_NODES
    rest = f"<p>And {more} more: elastic status -o wide.</p>" if more > 0 else ""
    return _table("Nodes", heads, rows) + rest


def _node(view: JobView, node: Node, row: int, now_s: float) -> str:
    step, heartbeat = _step_and_heartbeat(view, node, now_s)
    is_leader = view.leader is not None and view.leader.node_id == node.node_id
    generation = node.running.generation if node.running is not None else "–"
    mark = ' <span class="muted">leader</span>' if is_leader else ""
    return (
        f'<tr><th scope="row">{text(node.name, 60)}{mark}</th><td>{text(ranks_of(view, node))}</td>'
        f'<td>{text(view.state_of(node))}</td><td class="extra">{generation}</td>'
        f'<td id="step-{row}" class="extra">{step}</td><td id="heartbeat-{row}">{heartbeat}</td>'
        f'<td>{_age(node.joined_at_s, now_s)}</td><td class="extra">{text(node.address, 60)}</td>'
        "</tr>"
    )


def _cells(view: JobView, now_s: float) -> dict[str, str]:
    """The cells of the node rows that change every few seconds."""
    found = {}
    for row, node in enumerate([*view.members, *view.joining][:MAX_NODES]):
        found[f"step-{row}"], found[f"heartbeat-{row}"] = _step_and_heartbeat(view, node, now_s)
    return found


def _step_and_heartbeat(view: JobView, node: Node, now_s: float) -> tuple[str, str]:
    """The step of the node's workers and its last heartbeat, as received by the leader."""
    heartbeat = view.heartbeat_of(node)
    step = str(heartbeat.step) if heartbeat.step is not None else "–"
    if heartbeat.age_s is None:
        return step, "–"
    late = ' <strong class="late">late</strong>' if heartbeat.is_late else ""
    return step, f"{_age(view.at_s - heartbeat.age_s, now_s)}{late}"


def _incidents(view: JobView, now_s: float) -> str:
    broken = view.breakages
    if not broken:
        return "<p>None recorded in etcd.</p>"
    rows = "".join(_breakage(b, now_s) for b in reversed(broken[-_MAX_INCIDENTS:]))
    heads = ("When", "*Generation", "*Step", "What", "Response")
    return _table("Recent incidents", heads, rows)


def _breakage(breakage: BreakageRecord, now_s: float) -> str:
    step = breakage.step if breakage.step is not None else "–"
    why = f"<br>{text(breakage.verdict, 300)}" if breakage.verdict else ""
    return (
        f'<tr><td>{_age(breakage.time_s, now_s)}</td><td class="extra">{breakage.generation}</td>'
        f'<td class="extra">{step}</td><td class="long">{text(incident(breakage), 300)}{why}</td>'
        f'<td class="long">{text(breakage.response, 200)}</td></tr>'
    )


def _charts(snapshot: JobSnapshot) -> dict[str, str]:
    charts = snapshot.charts
    if charts is None or charts.problem:
        reason = charts.problem if charts is not None else _NO_CHARTS[snapshot.reads_journals]
        missing = "".join(f"<p>{text(line, 300)}</p>" for line in reason.splitlines())
        return {"timeline": missing, "breakdown": "", "curves": ""}
    too_large = "<p>Too large for this page: elastic report.</p>"
    return {
        "timeline": (_chart("Timeline", charts.timeline) or too_large) + _legend(charts.legend),
        "breakdown": _chart("Breakdown", charts.breakdown) or too_large,
        "curves": "".join(_chart("Curve", svg) or too_large for svg in charts.curves)
        or "<p>The script has logged no values.</p>",
    }


def _legend(activities: Iterable[str]) -> str:
    items = "".join(
        f'<li><span class="swatch {text(name.replace(" ", "-"))}"></span>{text(name)}</li>'
        for name in activities
    )
    return f'<ul class="legend" aria-label="Colours of the timeline">{items}</ul>'


_NO_CHARTS = {
    True: "Nothing is drawn yet.",
    False: "Charts are drawn from the journals of the job: elastic dashboard --journal FOLDER",
}


def _chart(name: str, svg: str) -> str:
    if not svg:
        return ""
    return f'<div class="wide" tabindex="0" role="group" aria-label="{name}, chart">{svg}</div>'


def _events(events: tuple[JobEvent, ...], now_s: float) -> str:
    if not events:
        return "<p>None yet.</p>"
    rows = "".join(_event(event, now_s) for event in reversed(events[-_MAX_EVENTS:]))
    return _table("Events", ("When", "Event", "*Node", "*Generation", "What"), rows)


def _event(event: JobEvent, now_s: float) -> str:
    generation = event.generation if event.generation is not None else "–"
    return (
        f'<tr><td>{_age(event.at_s, now_s)}</td><td class="name">{text(event.name, 40)}</td>'
        f'<td class="extra name">{text(event.node, 60)}</td><td class="extra">{generation}</td>'
        f'<td class="long">{text(event.text, 320)}</td></tr>'
    )


def _notes(notes: Iterable[str]) -> str:
    items = "".join(f"<li>{text(note, 300)}</li>" for note in list(notes)[:10])
    return f"<ul>{items}</ul>" if items else ""


_EXTRA = ' class="extra"'


def _table(name: str, heads: Iterable[str], rows: str) -> str:
    """A table that scrolls on a narrow screen, also by keyboard; ``*`` columns are hidden there."""
    head = "".join(
        f'<th scope="col"{_EXTRA if cell.startswith("*") else ""}>{cell.lstrip("*")}</th>'
        for cell in heads
    )
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{name}, table"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


# Times -------------------------------------------------------------------------------------------


def _age(at_s: float, now_s: float) -> str:
    """``12 s ago``, which the page keeps updating."""
    return f"{_time_tag(at_s, 'age')}{age_text(now_s - at_s)}</time>"


def _clock_time(at_s: float) -> str:
    return f"{_time_tag(at_s, 'clock')}{timestamp(at_s)[:19].replace('T', ' ')} UTC</time>"


def _time_tag(at_s: float, kind: str) -> str:
    return f'<time class="{kind}" datetime="{timestamp(at_s)}" data-at="{at_s:.3f}">'


def age_text(seconds: float) -> str:
    """Whole units, as the page's script writes them.

    >>> [age_text(s) for s in (-3, 12.9, 75, 3700, 200000)]
    ['0 s ago', '12 s ago', '1 min 15 s ago', '1 h 1 min ago', '2 d 7 h ago']
    """
    whole = max(0, int(seconds))
    return f"{whole} s ago" if whole < 60 else f"{duration(float(whole))} ago"


# The page ----------------------------------------------------------------------------------------


class PageTemplate:
    """page.html and its Content-Security-Policy."""

    def __init__(self, path: Path = _TEMPLATE) -> None:
        source = path.read_text(encoding="utf-8")
        self._template = Template(source)
        self.digest = hashlib.sha256(source.encode()).hexdigest()[:16]
        style, script = (_hash_of(source, tag) for tag in ("style", "script"))
        self.policy = (
            f"default-src 'none'; style-src '{style}'; script-src '{script}'; "
            "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
            "frame-ancestors 'none'"
        )

    def render(self, snapshot: JobSnapshot, sections: Mapping[str, str]) -> str:
        """The complete page, readable without JavaScript."""
        at = datetime.fromtimestamp(snapshot.at_s, timezone.utc)
        return self._template.substitute(
            {f"section_{name}": sections[name] for name in SECTIONS},
            run=text(snapshot.run_id or "an unnamed run", 100),
            state=text(snapshot.state),
            digest=self.digest,
            rendered=f"{snapshot.at_s:.3f}",
            time=f"{at:%Y-%m-%d %H:%M:%S} UTC",
        )


def _hash_of(source: str, tag: str) -> str:
    match = re.search(_BLOCK.format(tag), source, re.DOTALL)
    assert match is not None, f"page.html has no <{tag}>"
    return "sha256-" + b64encode(hashlib.sha256(match[1].encode()).digest()).decode()
