"""``elastic dashboard``: a live page of one job."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import hmac
import html
import json
import os
import re
import secrets
import socket
import sys
from base64 import b64encode
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from string import Template
from typing import Any, ClassVar

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import (
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from elastic.agent.identity import is_loopback
from elastic.cli.arguments import CommandParser, add_job_arguments
from elastic.cli.dashboard_feed import (
    UNKNOWN,
    EventLog,
    JobEvent,
    JobFeed,
    JobSnapshot,
    JournalFeed,
)
from elastic.cli.events import folder_of
from elastic.cli.status import SCHEMA, document, ranks_of
from elastic.cli.view import JobCondition, JobView, incident, job_store, keys_of, sentence
from elastic.errors import ConfigError
from elastic.membership.records import BreakageRecord, Node
from elastic.store.keyvalue import KeyValue
from elastic.telemetry.log import duration, printable, timestamp
from elastic.tuning.intervals import (
    DASHBOARD_DRAIN_S,
)

# A request to the dashboard must arrive completely within this: its few headers fit one packet.
DASHBOARD_REQUEST_S = 10.0
# The dashboard's server sends a message to an idle page this often: proxies close silent streams.
DASHBOARD_PING_S = 15.0
# A page that has lost its server reconnects after this.
DASHBOARD_RETRY_S = 1.0

# ----------------------------------------------------------------------------
# Access control of the page: pure decisions on the headers of a request.
#
# On loopback every user of the machine has access unless a token is set. A web site whose name is
# resolved to 127.0.0.1 (DNS rebinding) is detected by the Host header. On any other address a
# token is required: as ``Authorization: Bearer``, or once as ``?token=``, which sets a cookie.

MIN_TOKEN = 16  # characters
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
# kubelet and load balancers have no token; the check reveals only whether the server is alive.
OPEN_PATHS = frozenset({"/healthz"})


class AccessVerdict(Enum):
    """The decision on a request."""

    ALLOWED = "allowed"
    WRONG_HOST = "wrong host"
    NO_TOKEN = "no token"
    TOKEN_IN_QUERY = "token in query"  # correct: set the cookie and redirect to the URL without it


@dataclass(frozen=True)
class AccessPolicy:
    """``token``: None requires none. ``hosts``: the accepted Host headers; None accepts all."""

    token: str | None
    hosts: frozenset[str] | None
    cookie: str = "elastic-dashboard"

    def judge(
        self, *, host: str, path: str, authorization: str, cookie: str, query_token: str
    ) -> AccessVerdict:
        """Credentials of one request. ``cookie``: the value of the dashboard's cookie."""
        if self.hosts is not None and host_name(host) not in self.hosts:
            return AccessVerdict.WRONG_HOST
        if self.token is None or path in OPEN_PATHS:
            return AccessVerdict.ALLOWED
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() == "bearer" and _is_same(given.strip(), self.token):
            return AccessVerdict.ALLOWED
        if _is_same(cookie, self.cookie_value):
            return AccessVerdict.ALLOWED
        if path == "/" and _is_same(query_token, self.token):
            return AccessVerdict.TOKEN_IN_QUERY
        return AccessVerdict.NO_TOKEN

    @property
    def cookie_value(self) -> str:
        """A value that proves knowledge of the token without containing it."""
        token = (self.token or "").encode()
        return hmac.new(token, b"elastic dashboard cookie", hashlib.sha256).hexdigest()


def policy_of(
    host: str, port: int, token: str | None, allowed_hosts: tuple[str, ...] = ()
) -> AccessPolicy:
    """The policy of a server at ``host``. Raises ConfigError if it would be open to a network."""
    is_local = is_loopback(host)
    if not is_local and token is None:
        raise ConfigError(
            f"--host={host} would show the job to the network without a token",
            hint="head -c 24 /dev/urandom | base64 > token; elastic dashboard "
            f"--host={host} --token-file=token",
        )
    extra = frozenset(host_name(name) for name in allowed_hosts)
    if is_local:
        hosts: frozenset[str] | None = LOOPBACK_NAMES | {host_name(host)} | extra
    else:
        hosts = extra or None  # a rebound site does not receive a cookie set under another name
    return AccessPolicy(token, hosts, f"elastic-dashboard-{port}")


def host_name(header: str) -> str:
    """The name in a Host header, without the port.

    >>> [host_name(h) for h in ("Localhost.:80", "[::1]:80", "::1", "10.0.0.1")]
    ['localhost', '::1', '::1', '10.0.0.1']
    """
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    if header.count(":") == 1:
        header = header.partition(":")[0]
    return header.rstrip(".")


def read_token(path: str) -> str:
    """The token in the first line of a file. Raises ConfigError."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--token-file={path} cannot be read: {error}",
            hint="name a file that contains the token",
        ) from error
    return checked_token(lines[0].strip() if lines else "", f"--token-file={path}")


def checked_token(token: str, place: str) -> str:
    """The token. Raises ConfigError if it is too short, or no header can hold it."""
    if len(token) < MIN_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"{place}: a token has at least {MIN_TOKEN} printable ASCII characters and no spaces",
            hint="head -c 24 /dev/urandom | base64 > token",
        )
    return token


def _is_same(given: str, expected: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(given.encode(errors="surrogatepass"), expected.encode())


# ----------------------------------------------------------------------------
# ``/metrics`` of the dashboard: the job as a whole, as gauges (prometheus-client).
#
# Agents serve metrics per node; these describe the job and end with it.


@dataclass(frozen=True)
class JobGauge:
    """A metric and its samples: one per value of its only label, or one without a label."""

    name: str
    help: str
    label: str
    samples: tuple[tuple[str, float], ...]


def gauges_of(snapshot: JobSnapshot) -> Iterator[JobGauge]:
    """All metrics; an unknown number has no sample."""
    view = snapshot.view
    progress = view.progress if view is not None else None
    states = [*(condition.value for condition in JobCondition), UNKNOWN]
    yield JobGauge(
        "elastic_job_state",
        "1 for the job's current state, else 0",
        "state",
        tuple((state, float(state == snapshot.state)) for state in states),
    )
    world = view.world if view is not None else None
    yield _one("generation", "Generation of the newest world", world.generation if world else None)
    yield _one("step", "Steps committed", view.step if view else None)
    planned = progress.planned_steps if progress else None
    yield _one("planned_steps", "Total number of steps planned by the script", planned)
    rate = view.steps_per_s if view else None
    yield _one("steps_per_second", "Step rate while the job trains", rate)
    yield _one("eta_seconds", "Time until the last planned step", view.eta_s if view else None)
    yield _one(
        "goodput_ratio",
        "Fraction of time spent in steps that count",
        _goodput_prometheus_page(snapshot),
    )
    saved = progress.checkpoint_step if progress else None
    yield _one("checkpoint_step", "Step of the last committed checkpoint", saved)
    age_s = view.checkpoint_age_s if view else None
    yield _one("checkpoint_age_seconds", "Age of the last committed checkpoint", age_s)
    states_of_nodes = Counter(node.state.value for node in (view.nodes if view else ()))
    yield JobGauge(
        "elastic_job_nodes",
        "Live nodes, by state",
        "state",
        tuple((state, float(count)) for state, count in sorted(states_of_nodes.items())),
    )
    yield _one("etcd_up", "0 while etcd does not answer the dashboard", float(not snapshot.outage))
    view_age_s = snapshot.at_s - view.at_s if view is not None else None
    yield _one("view_age_seconds", "Time since etcd last answered", view_age_s)


def _one(name: str, help: str, value: float | None) -> JobGauge:
    samples = () if value is None else (("", float(value)),)
    return JobGauge(f"elastic_job_{name}", f"{help}.", "", samples)


def _goodput_prometheus_page(snapshot: JobSnapshot) -> float | None:
    if snapshot.charts is not None and snapshot.charts.goodput is not None:
        return snapshot.charts.goodput
    return snapshot.view.goodput if snapshot.view is not None else None


def exposition(snapshot: JobSnapshot) -> tuple[bytes, str]:
    """The page and its content type. Raises ImportError without prometheus-client."""
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest

    registry = CollectorRegistry()
    run_id = printable(snapshot.run_id, 100)
    for gauge in gauges_of(snapshot):
        labels = ("run_id", gauge.label) if gauge.label else ("run_id",)
        metric = Gauge(gauge.name, gauge.help, labels, registry=registry)
        for value, number in gauge.samples:
            values = (run_id, value) if gauge.label else (run_id,)
            metric.labels(*values).set(number)
    return generate_latest(registry), CONTENT_TYPE_LATEST


# ----------------------------------------------------------------------------
# A snapshot as HTML: sections that are resent when they change, and the page around them.
#
# Pure. All untrusted text (names, errors) passes through :func:`text`, and nothing else does.

MAX_NODES = 100  # rows; a page is 250 kB at most
_MAX_EVENTS = 50
_MAX_INCIDENTS = 10
_TEMPLATE = Path(__file__).with_name("dashboard.html")
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
    yield from _goodput_page(snapshot)
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


def _goodput_page(snapshot: JobSnapshot) -> Iterator[tuple[str, str]]:
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


# ----------------------------------------------------------------------------
# Documents of ``/api/status`` and ``/api/events``: docs/reference/status.md lists the fields.


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


# ----------------------------------------------------------------------------
# Renders each snapshot once, for all clients, and wakes them.
#
# ``publish`` may be called on any thread; everything else runs on the event loop. A slow client
# skips intermediate states and always gets the newest one.

MAX_STREAMS = 512
_PING = b": ping\n\n"


@dataclass(frozen=True)
class Rendering:
    """Every response that a client may request, as bytes."""

    number: int = 0
    snapshot: JobSnapshot | None = None
    page: bytes = b""
    status: bytes = b"{}"  # the JSON document
    sections: Mapping[str, str] = field(default_factory=dict)
    # The number of the rendering in which each section last changed.
    changed: Mapping[str, int] = field(default_factory=dict)
    events: tuple[JobEvent, ...] = ()


Following = Callable[[Rendering, Rendering], bytes]


class Publisher:
    """The publisher. ``server`` identifies this start of the server to pages that outlive it."""

    def __init__(self, server: str, template: PageTemplate | None = None) -> None:
        self.template = template or PageTemplate()
        self._server = server
        self._newest = Rendering()  # owned by the publishing thread
        self._loop: asyncio.AbstractEventLoop | None = None
        self._shown = Rendering()  # owned by the event loop
        self._changed = asyncio.Event()
        self._updates: dict[tuple[Following, int, int], bytes] = {}
        self._is_closed = False
        self.streams = 0

    @property
    def shown(self) -> Rendering:
        """The newest rendering."""
        return self._shown

    # -- on any thread ------------------------------------------------------------------------

    def publish(self, snapshot: JobSnapshot) -> None:
        """Render, and pass to the event loop if it runs. Not reentrant."""
        self._newest = render(snapshot, self._newest, self.template)
        loop = self._loop
        if loop is None:  # no clients yet
            self._shown = self._newest
        elif not loop.is_closed():
            loop.call_soon_threadsafe(self._show)

    # -- on the event loop --------------------------------------------------------------------

    def attach(self) -> None:
        """Start serving on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._show()

    def close(self) -> None:
        """End every stream. Idempotent."""
        self._is_closed = True
        self._wake()

    def _show(self) -> None:
        self._shown = self._newest
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def stream(self, following: Following) -> AsyncIterator[bytes]:
        """Server-sent events: ``following(before, now)`` for each new rendering."""
        self.streams += 1
        try:
            yield self._hello()
            before = Rendering()
            while not self._is_closed:
                changed, now = self._changed, self._shown
                if now.number > before.number:
                    if data := self._following(following, before, now):
                        yield data
                    before = now
                    continue
                try:
                    await asyncio.wait_for(changed.wait(), DASHBOARD_PING_S)
                except (asyncio.TimeoutError, TimeoutError):
                    yield _PING
        finally:
            self.streams -= 1

    def _following(self, following: Following, before: Rendering, now: Rendering) -> bytes:
        """The update from a rendering, computed once: most clients have the same one."""
        key = (following, before.number, now.number)
        if key not in self._updates:
            self._updates = {k: v for k, v in self._updates.items() if k[2] == now.number}
            self._updates[key] = following(before, now)
        return self._updates[key]

    def _hello(self) -> bytes:
        snapshot = self._shown.snapshot
        hello = {
            "page": self.template.digest,
            "server": self._server,
            "time": snapshot.at_s if snapshot is not None else 0.0,
        }
        retry_ms = int(DASHBOARD_RETRY_S * 1000)
        return f"retry: {retry_ms}\n".encode() + message("hello", hello)


def render(snapshot: JobSnapshot, before: Rendering, template: PageTemplate) -> Rendering:
    """Render everything; parts that changed only in ages keep the number of their last change."""
    number = before.number + 1
    sections = sections_of(snapshot)
    changed = {
        name: before.changed[name]
        if name in before.sections and lasting(before.sections[name]) == lasting(section)
        else number
        for name, section in sections.items()
    }
    status = json.dumps(status_document(snapshot)).encode()
    return Rendering(
        number=number,
        snapshot=snapshot,
        page=template.render(snapshot, sections).encode(),
        status=status,
        sections=sections,
        changed=changed,
        events=snapshot.events,
    )


# What streams send -------------------------------------------------------------------------------


def page_changes(before: Rendering, now: Rendering) -> bytes:
    """The sections that a page does not have yet: at first all of them."""
    changed = {name: now.sections[name] for name, at in now.changed.items() if at > before.number}
    return message("sections", changed) if changed else b""


def api_changes(before: Rendering, now: Rendering) -> bytes:
    """The status and the events not yet sent."""
    last = before.events[-1].number if before.events else 0
    events = b"".join(
        message("event", event_document(event), event.number)
        for event in now.events
        if event.number > last
    )
    status = b"event: status\ndata: " + now.status + b"\n\n"
    return events + status


def message(kind: str, data: Any, number: int | None = None) -> bytes:
    """One server-sent event. The JSON contains no line breaks."""
    identity = f"id: {number}\n" if number is not None else ""
    return f"event: {kind}\n{identity}data: {json.dumps(data)}\n\n".encode()


# ----------------------------------------------------------------------------
# Filters requests before the application: methods, hosts and tokens of requests, and response
# headers.

_METHODS = ("GET", "HEAD")
_LONGEST_QUERY = 2048


class RequestFilter:
    """ASGI middleware. ``content_policy``: the Content-Security-Policy of every answer."""

    def __init__(self, app: ASGIApp, policy: AccessPolicy, content_policy: str) -> None:
        self._app = app
        self._policy = policy
        self._headers: Mapping[str, str] = {
            "Content-Security-Policy": content_policy,
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cache-Control": "no-store",
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # "lifespan"; there are no web sockets
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self._headers.items():
                    headers[name] = value
            await send(message)

        answer = self._refusal(Request(scope))
        await (answer or self._app)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        """The response that replaces the application's, or None."""
        if request.method not in _METHODS:
            return PlainTextResponse(
                "this page is read-only: GET and HEAD only\n",
                status_code=405,
                headers={"Allow": ", ".join(_METHODS)},
            )
        if len(request.scope["query_string"]) > _LONGEST_QUERY:
            return PlainTextResponse("the query is too long\n", status_code=414)
        return self._answer(self._verdict(request))

    def _verdict(self, request: Request) -> AccessVerdict:
        headers: Headers = request.headers
        return self._policy.judge(
            host=headers.get("host", ""),
            path=request.url.path,
            authorization=headers.get("authorization", ""),
            cookie=request.cookies.get(self._policy.cookie, ""),
            query_token=request.query_params.get("token", ""),
        )

    def _answer(self, verdict: AccessVerdict) -> Response | None:
        match verdict:
            case AccessVerdict.ALLOWED:
                return None
            case AccessVerdict.WRONG_HOST:
                return PlainTextResponse(
                    "the dashboard does not serve this host name: use localhost, or start it with "
                    "--allowed-host NAME\n",
                    status_code=421,
                )
            case AccessVerdict.TOKEN_IN_QUERY:
                answer = RedirectResponse(".", status_code=303)
                answer.set_cookie(
                    self._policy.cookie, self._policy.cookie_value, httponly=True, samesite="lax"
                )
                return answer
            case AccessVerdict.NO_TOKEN:
                return PlainTextResponse(
                    "the dashboard requires its token: open /?token=TOKEN once in this browser, or "
                    "send Authorization: Bearer TOKEN\n",
                    status_code=401,
                    headers={"WWW-Authenticate": 'Bearer realm="elastic dashboard"'},
                )


# ----------------------------------------------------------------------------
# The routes of the page, as a Starlette application. Responses are rendered in advance.

_EVENT_STREAM = "text/event-stream"
Endpoint = Callable[[Request], Awaitable[Response]]


def application(
    publisher: Publisher, policy: AccessPolicy, is_alive: Callable[[], bool]
) -> ASGIApp:
    """The page, its streams and its API. ``is_alive``: whether the job is still watched."""
    pages = _Pages(publisher, is_alive)
    routes: dict[str, Endpoint] = {
        "/": pages.page,
        "/live": pages.live,
        "/healthz": pages.healthz,
        "/metrics": pages.metrics,
        "/api/status": pages.status,
        "/api/events": pages.events,
    }
    app = Starlette(routes=[Route(path, endpoint) for path, endpoint in routes.items()])
    return RequestFilter(app, policy, publisher.template.policy)


class _Pages:
    def __init__(self, publisher: Publisher, is_alive: Callable[[], bool]) -> None:
        self._publisher = publisher
        self._is_alive = is_alive

    async def page(self, request: Request) -> Response:
        return Response(self._publisher.shown.page, media_type="text/html")

    async def live(self, request: Request) -> Response:
        return self._stream(page_changes)

    async def status(self, request: Request) -> Response:
        return Response(self._publisher.shown.status, media_type="application/json")

    async def events(self, request: Request) -> Response:
        if _EVENT_STREAM in request.headers.get("accept", ""):
            return self._stream(api_changes)
        given = request.query_params.get("since", "0")
        if not (given.isascii() and given.isdigit()):
            return PlainTextResponse("since: the number of an event\n", status_code=400)
        since = int(given[:18])
        found = [event_document(e) for e in self._publisher.shown.events if e.number > since]
        return Response(
            json.dumps({"schema": SCHEMA, "events": found}), media_type="application/json"
        )

    async def healthz(self, request: Request) -> Response:
        is_ok = self._is_alive()
        reason = "the job is being watched" if is_ok else "a thread that watches the job has died"
        return JSONResponse({"ok": is_ok, "reason": reason}, status_code=200 if is_ok else 503)

    async def metrics(self, request: Request) -> Response:
        snapshot = self._publisher.shown.snapshot
        if snapshot is None:
            return PlainTextResponse("no data yet\n", status_code=503)
        try:
            data, content_type = exposition(snapshot)
        except ImportError:
            return PlainTextResponse(
                "prometheus-client is not installed: pip install "
                "'torch-elastic-harness[metrics]'\n",
                status_code=501,
            )
        return Response(data, headers={"Content-Type": content_type})

    def _stream(self, following: Following) -> Response:
        if self._publisher.streams >= MAX_STREAMS:
            return PlainTextResponse(
                f"{MAX_STREAMS} pages are open already\n",
                status_code=503,
                headers={"Retry-After": "10"},
            )
        return StreamingResponse(
            self._publisher.stream(following),
            media_type=_EVENT_STREAM,
            headers={"X-Accel-Buffering": "no"},
        )


# ----------------------------------------------------------------------------
# ``elastic dashboard``: arguments, and assembly of the parts.

DEFAULT_PORT = 8630
TOKEN_VARIABLE = "ELASTIC_DASHBOARD_TOKEN"


def main(argv: Sequence[str]) -> int:
    """Run ``elastic dashboard ARGV``; returns the exit code."""
    args = parser().parse_args(list(argv))
    token = token_of(args)
    policy_of(args.host, args.port, token)  # before anything is started
    _require_extra()
    _serve(args, token)
    return 0


def parser(environ: Mapping[str, str] = os.environ) -> argparse.ArgumentParser:
    """The command line of ``elastic dashboard``."""
    own = CommandParser(
        prog="elastic dashboard",
        description="Serve a live, read-only page with a job's status: state, nodes, incidents, "
        "where its time goes, and events. Reads etcd, and the journals if --journal is given. "
        "See docs/how-to/observe.md.",
        epilog="exit codes: 0 success, 2 usage, 130 Ctrl-C",
    )
    add_job_arguments(own, environ)
    own.add_argument(
        "--journal",
        default=environ.get("ELASTIC_JOURNAL"),
        metavar="FOLDER",
        help="journal folder, for events and charts; required without --rdzv-endpoint (default: "
        "ELASTIC_JOURNAL)",
    )
    own.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="listen address; any but a loopback address needs a token (default: %(default)s)",
    )
    own.add_argument(
        "--port",
        type=int,
        default=DEFAULT_PORT,
        help="TCP port; 0: any free port (default: %(default)s)",
    )
    own.add_argument(
        "--token-file",
        metavar="FILE",
        help=f"file whose first line is the access token (default: ${TOKEN_VARIABLE})",
    )
    own.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="additional host name to accept in requests; may be repeated",
    )
    return own


def token_of(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> str | None:
    """The access token, or None. Raises ConfigError."""
    if args.token_file:
        return read_token(args.token_file)
    if TOKEN_VARIABLE in environ:
        return checked_token(environ[TOKEN_VARIABLE], TOKEN_VARIABLE)
    return None


def _require_extra() -> None:
    try:
        import starlette
        import uvicorn
    except ImportError as error:
        raise ConfigError(
            f"the dashboard needs the package {error.name}, which is not installed",
            hint="pip install 'torch-elastic-harness[dashboard]'",
        ) from error
    del starlette, uvicorn


def _serve(args: argparse.Namespace, token: str | None) -> None:

    publisher = Publisher(secrets.token_hex(4))
    died: list[BaseException] = []

    def end(error: BaseException) -> None:
        died.append(error)
        server.should_exit = True

    feed = _feed_of(args, publisher.publish, end)
    with listening(args.host, args.port) as listener:
        port = listener.getsockname()[1]
        policy = policy_of(args.host, port, token, tuple(args.allowed_host))
        server = DashboardServer(application(publisher, policy, lambda: feed.is_alive), publisher)
        publisher.publish(feed.snapshot)
        feed.start()
        print(_address_line(args.host, port, policy), flush=True)
        try:
            server.serve_on(listener)
        finally:
            feed.close()
    if died:
        raise died[0]


def _feed_of(
    args: argparse.Namespace,
    on_change: Callable[[JobSnapshot], object],
    on_error: Callable[[BaseException], object],
) -> JobFeed:
    """The feed of the job. Raises ConfigError if neither etcd nor journals are given."""
    uses_etcd = bool(args.rdzv_endpoint)
    if not uses_etcd and not args.journal:
        raise ConfigError(
            "neither --rdzv-endpoint nor --journal is given",
            hint="give etcd's endpoint, the folder of the job's journals, or both",
        )
    keys = keys_of(args) if uses_etcd else None
    log = EventLog()
    journals = None
    if args.journal:
        run_id = keys.run_id if keys is not None else (args.rdzv_id or "")
        # A job that has not started has no journals yet: with etcd, the folder may appear later.
        folder = Path(args.journal) if uses_etcd else folder_of(args.journal)
        if not folder.is_dir():
            print(
                f"elastic dashboard: there is no folder {printable(args.journal)} yet: events come "
                "from etcd only, and there are no charts",
                file=sys.stderr,
            )
        journals = JournalFeed(folder, run_id, log)
    return JobFeed(
        keys,
        StoreOpener(args) if uses_etcd else None,
        journals,
        log,
        on_change=on_change,
        on_error=on_error,
    )


class StoreOpener:
    """Connects to the job's store. Only the first attempt is reported on stderr: the page shows
    since when etcd is unreachable."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._is_first = True

    def __call__(self) -> AbstractContextManager[KeyValue]:
        is_first, self._is_first = self._is_first, False
        return job_store(self._args, reports_delay=is_first)


def _address_line(host: str, port: int, policy: AccessPolicy) -> str:
    name = f"[{host}]" if ":" in host else host
    suffix = "?token=TOKEN" if policy.token is not None else ""
    return f"elastic dashboard: http://{name}:{port}/{suffix} (Ctrl-C ends it)"


# ----------------------------------------------------------------------------
# Serves the page with uvicorn until a signal, or until the job feed fails.

_BACKLOG = 512
_MOST_UNFINISHED = 512  # requests; for another one, the oldest connection is closed


class LimitedConnection(H11Protocol):
    """A connection whose requests must arrive in time. uvicorn limits neither the time of a request
    that is never completed nor the number of such connections."""

    unfinished: ClassVar[dict[LimitedConnection, asyncio.TimerHandle]] = {}  # oldest first

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()
        if len(self.unfinished) > _MOST_UNFINISHED:
            next(iter(self.unfinished)).transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self not in self.unfinished:
            self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _expect_request(self) -> None:
        self.unfinished[self] = self.loop.call_later(DASHBOARD_REQUEST_S, self._close)

    def _close(self) -> None:
        self._forget()
        self.transport.close()

    def _forget(self) -> None:
        if (timer := self.unfinished.pop(self, None)) is not None:
            timer.cancel()


class DashboardServer(uvicorn.Server):
    """A server that closes its streams on shutdown: connected clients would keep it alive."""

    def __init__(self, app: ASGIApp, publisher: Publisher) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,  # URLs may contain the token
                lifespan="off",
                server_header=False,
                ws="none",
                http=LimitedConnection,
                timeout_keep_alive=int(DASHBOARD_PING_S),
                timeout_graceful_shutdown=int(DASHBOARD_DRAIN_S),
            )
        )
        self._publisher = publisher

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._publisher.attach()
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._publisher.close()
        await super().shutdown(sockets)

    def serve_on(self, listener: socket.socket) -> None:
        """Serve until a signal ends it."""
        asyncio.run(self.serve(sockets=[listener]))


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A bound socket. Raises ConfigError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigError(
            f"--host={host} --port={port} could not be bound: {error}",
            hint="pass another --port; 0 selects a free one",
        ) from error
    try:
        yield listener
    finally:
        listener.close()
