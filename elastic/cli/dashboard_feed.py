"""What the dashboard shows: snapshots of a job, from etcd and from journals."""

from __future__ import annotations

import threading
import xml.etree.ElementTree as ET
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from elastic.cli.last_known import changes_of, last_known
from elastic.cli.view import JobCondition, JobView, read_job
from elastic.errors import SYSTEM_CLOCK, Clock, ConfigError, CoordinationError
from elastic.membership.records import Keys
from elastic.store.keyvalue import KeyValue
from elastic.telemetry.log import duration, get_logger, printable
from elastic.telemetry.reader import UNNAMED_RUNS, JournalFolder, JournalRecord
from elastic.tuning.intervals import (
    DASHBOARD_DRAIN_S,
)

# `elastic dashboard` polls etcd this often, once for all of its clients, so that a page shows a
# loss within two seconds.
DASHBOARD_ETCD_S = 1.0
# `elastic dashboard` checks the journals for new lines this often.
DASHBOARD_JOURNALS_S = 0.5
# `elastic dashboard` redraws its charts this often; a change of the world is drawn at once.
DASHBOARD_CHARTS_S = 15.0
# Pause before `elastic dashboard` connects to etcd again after a failed attempt.
DASHBOARD_RECONNECT_S = 1.0

# ----------------------------------------------------------------------------
# The state that the page shows at one moment. Immutable: it is passed between threads.

UNKNOWN = "unknown"  # in addition to JobCondition: etcd has not answered yet


@dataclass(frozen=True)
class JobEvent:
    """An event from the journals, or a change seen in etcd."""

    number: int  # per server: ascending, without gaps
    at_s: float  # Unix time
    name: str
    node: str
    generation: int | None
    step: int | None
    text: str  # one line


@dataclass(frozen=True)
class Outage:
    """A period in which etcd does not answer or denies access."""

    since_s: float  # Unix time
    reason: str


@dataclass(frozen=True)
class RunCharts:
    """Charts drawn from the journals as SVG elements, or the reason why there are none."""

    timeline: str = ""
    breakdown: str = ""
    curves: tuple[str, ...] = ()
    goodput: float | None = None
    goodput_of_s: float = 0.0  # the period that it covers
    legend: tuple[str, ...] = ()  # activities of the timeline
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class JobSnapshot:
    """All facts of the page, at ``at_s`` of the wall clock."""

    run_id: str
    at_s: float
    view: JobView | None = None  # from etcd's last answer
    outage: Outage | None = None
    uses_etcd: bool = True
    reads_journals: bool = False
    last_known: Sequence[str] = ()  # from the journals, while etcd does not answer
    events: tuple[JobEvent, ...] = ()  # the last events, oldest first
    charts: RunCharts | None = None  # None: not drawn yet
    notes: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """The state: a value of :class:`JobCondition`, or "unknown"."""
        return self.view.state.value if self.view is not None else UNKNOWN

    @property
    def is_stale(self) -> bool:
        """Whether the view is older than it should be."""
        return self.outage is not None

    @property
    def needs_attention(self) -> bool:
        """Whether the job needs attention."""
        bad = (JobCondition.FAILED, JobCondition.DOWN, JobCondition.PAUSED)
        return self.state in {condition.value for condition in bad}


# ----------------------------------------------------------------------------
# The charts of the page, drawn from the journals by :mod:`elastic.report`.
#
# The page's Content-Security-Policy forbids inline styles: ``style`` attributes of an SVG
# become presentation attributes, and its ``<style>`` is left to the page.

LARGEST = 36_000  # bytes of a chart: a page is 250 kB at most
_SEGMENTS = 400  # per timeline, so that a chart stays below LARGEST
_NAMESPACE = "http://www.w3.org/2000/svg"


def charts_of(
    records: Sequence[JournalRecord], notes: Sequence[str], run_id: str | None
) -> RunCharts:
    """Draw the charts. Imports matplotlib; a chart that cannot be drawn becomes a sentence."""
    from elastic.report.model import TimelineLimits, curves_of, generation_marks, timeline_of
    from elastic.report.render import breakdown_svg, curve_svg, timeline_svg
    from elastic.telemetry.goodput import goodput_of_run
    from elastic.telemetry.reader import merge, run_of

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


# ----------------------------------------------------------------------------
# The last events of a job, numbered, one line each: from its journals, else from etcd.
#
# A thousand ranks record the same recovery: only the first event is kept.

MAX_EVENTS = 300
_REMEMBERED = 2000
_LONGEST_TEXT = 300
_LONGEST_NAME = 60
# Events that all ranks write: one is kept.
_OF_ALL_RANKS = frozenset({"recovered", "world-fault", "state-restored"})
_OF_ALL_NODES = frozenset({"leader-changed", "job-ended", "node-parked"})
# Without "checkpoint-saved": in a job that saves every few steps it would displace all others.
_SHOWN = frozenset(
    {
        *("world-formed", "recovered", "world-fault", "state-restored"),
        *("worker-died", "worker-stuck", "worker-replaced", "collective-failed", "failure-judged"),
        *("node-lost", "node-found", "node-suspected", "node-leaving", "leader-changed"),
        *("hang-found", "hang-over", "straggler-found", "straggler-recovered"),
        *("checkpoint-skipped", "store-problem", "lease-lost", "waiting", "job-ended"),
    }
)


class EventLog:
    """The log. Written by one thread, readable from any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: deque[JobEvent] = deque(maxlen=MAX_EVENTS)
        self._seen: OrderedDict[tuple[object, ...], None] = OrderedDict()
        self._number = 0

    @property
    def events(self) -> tuple[JobEvent, ...]:
        """The last events, oldest first."""
        with self._lock:
            return tuple(self._events)

    def add_records(self, records: Iterable[JournalRecord]) -> bool:
        """Add the events worth showing; returns whether there were any."""
        shown = sorted((r for r in records if r.name in _SHOWN), key=lambda r: r.time_s)
        fresh = [record for record in shown if not self._is_known(_key(record))]
        for record in fresh:
            self._add(
                at_s=record.time_s,
                name=record.name,
                node=record.node,
                generation=record.whole("generation"),
                step=record.whole("step"),
                text=text_of(record),
            )
        return bool(fresh)

    def add_changes(self, view: JobView) -> bool:
        """Add changes that etcd shows for the first time; returns whether there were any."""
        number = self._number
        for change in changes_of(view):
            if not self._is_known(change.key):
                self._add(
                    at_s=change.at_s,
                    name=change.name,
                    node="",
                    generation=change.generation,
                    step=None,
                    text=change.text,
                )
        return self._number > number

    def _is_known(self, key: tuple[object, ...] | None) -> bool:
        if key is None:
            return False
        is_known = key in self._seen
        self._seen[key] = None
        while len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return is_known

    def _add(
        self,
        *,
        at_s: float,
        name: str,
        node: str,
        generation: int | None,
        step: int | None,
        text: str,
    ) -> None:
        self._number += 1
        event = JobEvent(
            number=self._number,
            at_s=at_s,
            name=name,
            node=printable(node, _LONGEST_NAME),
            generation=generation,
            step=step,
            text=text,
        )
        with self._lock:
            self._events.append(event)


def _key(record: JournalRecord) -> tuple[object, ...] | None:
    """A key that is equal for duplicates from many processes; None: not deduplicated."""
    if record.name in _OF_ALL_RANKS:
        return record.name, record.whole("generation")
    if record.name in _OF_ALL_NODES:
        return record.name, record.text("leader"), record.text("reason")
    return None


def text_of(record: JournalRecord) -> str:
    """An event of the journals as one readable line."""
    reason = _last_line(record.text("reason") or record.text("error"))
    return printable(_describe(record, reason), _LONGEST_TEXT)


def _describe(record: JournalRecord, reason: str) -> str:
    data, step = record.data, record.whole("step")
    match record.name:
        case "world-formed":
            nodes = data.get("nodes")
            count = len(nodes) if isinstance(nodes, list) else "?"
            return f"with {count} nodes, {record.whole('size')} workers: {reason}"
        case "node-lost":
            return f"{_short(record.text('lost'))} was lost: {reason}"
        case "node-found":
            return f"{_short(record.text('found'))} responds again: {reason}"
        case "node-suspected":
            return f"{_short(record.text('suspect'))} may be dead: {reason}"
        case "worker-died":
            return f"the worker of local rank {record.whole('local_rank')} died: {reason}"
        case "recovered":
            return f"training resumed from step {step}"
        case "world-fault":
            return f"a collective failed after step {step}: {reason}"
        case "state-restored":
            return f"state of step {step} from {_short(record.text('source'))}"
        case "failure-judged":
            return f"{record.text('action')}, rule {record.text('rule')}: {reason}"
        case "checkpoint-skipped":
            return f"{_short(record.text('name'))}: {reason}"
        case "leader-changed":
            leader = record.text("leader")
            return f"node {_short(leader)} is the leader" if leader else "there is no leader"
        case "job-ended":
            return f"{record.text('outcome')}: {reason}"
        case "worker-replaced":
            return f"a new process replaced the worker of local rank {record.whole('local_rank')}"
        case _:
            return reason or record.text("consequence")


def _short(name: str) -> str:
    return printable(name, _LONGEST_NAME)


def _last_line(text: str) -> str:
    """The last line of a traceback, which is the most informative."""
    return text.strip().rpartition("\n")[2]


# ----------------------------------------------------------------------------
# Follows the journals of a job: events immediately, charts when they are due.

_MAX_NOTES = 10
# A chart is redrawn immediately after these events.
_URGENT = frozenset({"world-formed", "recovered", "job-ended"})
_DRAWING_INTERVALS = 10  # wait ten times as long as drawing takes: at most 1/10 of a core

Draw = Callable[[list[JournalRecord], list[str], "str | None"], RunCharts]


class JournalFeed:
    """Follows one folder. One thread calls ``look``, one ``draw_if_due``; the rest is thread-safe.

    ``run_id``: "" selects the run that began last.
    """

    def __init__(
        self,
        folder: Path,
        run_id: str,
        log: EventLog,
        *,
        clock: Clock = SYSTEM_CLOCK,
        draw: Draw = charts_of,
    ) -> None:
        self._folder = folder
        self._run_id = run_id
        self._log = log
        self._clock = clock
        self._draw = draw
        self._reader = JournalFolder(folder)
        self._lock = threading.Lock()
        self._records: list[JournalRecord] = []
        self._notes: list[str] = []
        self._runs: dict[str, str] = {}  # by writer
        self._is_urgent = False
        self._drawn_records = 0
        self._due_s = float("-inf")
        self.charts: RunCharts | None = None

    @property
    def run_id(self) -> str:
        """The requested run, or the run of the journal opened last."""
        named = [run for run in self._runs.values() if run not in UNNAMED_RUNS]
        return self._run_id or (named[-1] if named else "")

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on files that could not be read."""
        with self._lock:
            return tuple(self._notes[:_MAX_NOTES])

    def last_known(self, now_s: float) -> list[str]:
        """The last known state according to the journals, as lines of text."""
        return last_known(str(self._folder), self._run_id, now_s)

    def look(self) -> bool:
        """Read new events; returns whether there were any."""
        found = self._reader.read_new()
        for record in found:
            if record.name == "journal-opened":
                self._runs[record.writer] = record.text("run_id")
        own = [r for r in found if self._runs.get(r.writer, "") in (*UNNAMED_RUNS, self.run_id)]
        self._log.add_records(own)
        notes = self._reader.notes(is_growing=True)
        with self._lock:
            is_news = bool(own) or notes != self._notes
            self._notes = notes
            self._records += own
            self._is_urgent |= any(record.name in _URGENT for record in own)
        return is_news

    def draw_if_due(self) -> bool:
        """Redraw the charts if there are new events for them; returns whether it did."""
        now_s = self._clock.monotonic()
        with self._lock:
            is_news = len(self._records) > self._drawn_records
            if not is_news or (now_s < self._due_s and not self._is_urgent):
                return False
            records, notes = list(self._records), list(self._notes)
            self._is_urgent = False
        self.charts = self._draw(records, notes, self.run_id or None)
        self._drawn_records = len(records)
        took_s = self._clock.monotonic() - now_s
        self._due_s = self._clock.monotonic() + max(DASHBOARD_CHARTS_S, _DRAWING_INTERVALS * took_s)
        return True


# ----------------------------------------------------------------------------
# Watches a job on behalf of all clients of the page.
#
# One thread reads etcd, one the journals, and one draws the charts.

OpenStore = Callable[[], AbstractContextManager[KeyValue]]


class JobFeed:
    """Watches from ``start`` to ``close``. ``on_change`` gets every snapshot, on one thread
    at a time; ``on_error`` gets the exception that ended a thread.

    ``open_store``: connects to etcd, or None to read journals only. ``journals``: None if there are
    none.
    """

    def __init__(
        self,
        keys: Keys | None,
        open_store: OpenStore | None,
        journals: JournalFeed | None,
        log: EventLog,
        *,
        on_change: Callable[[JobSnapshot], object],
        on_error: Callable[[BaseException], object],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._keys = keys
        self._open_store = open_store
        self._journals = journals
        self._log = log
        self._on_change = on_change
        self._on_error = on_error
        self._clock = clock
        self._lock = threading.Lock()
        self._closing = threading.Event()
        run_id = keys.run_id if keys is not None else ""
        self._snapshot = JobSnapshot(
            run_id=run_id,
            at_s=clock.wall(),
            uses_etcd=open_store is not None,
            reads_journals=journals is not None,
        )
        self._threads = [
            threading.Thread(target=self._guarded, args=(loop,), name=name, daemon=True)
            for loop, name, is_used in (
                (self._watch_etcd, "elastic-dashboard-etcd", open_store is not None),
                (self._watch_journals, "elastic-dashboard-journals", journals is not None),
                (self._watch_charts, "elastic-dashboard-charts", journals is not None),
            )
            if is_used
        ]

    @property
    def snapshot(self) -> JobSnapshot:
        """The newest snapshot."""
        with self._lock:
            return self._snapshot

    @property
    def is_alive(self) -> bool:
        """Whether all threads are running."""
        return all(thread.is_alive() for thread in self._threads)

    def start(self) -> None:
        """Start watching."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop, and wait for the threads for at most ``DASHBOARD_DRAIN_S``. Idempotent.

        Drawing, and connecting to an etcd that does not answer, take longer than a user who
        presses Ctrl-C waits. The threads are daemons.
        """
        self._closing.set()
        deadline_s = self._clock.monotonic() + DASHBOARD_DRAIN_S
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline_s - self._clock.monotonic()))

    def _guarded(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except BaseException as error:
            get_logger().exception("a thread of the dashboard died")
            self._on_error(error)
            raise

    def _publish(self, **changes: object) -> None:
        if self._closing.is_set():  # a thread that close() did not wait for
            return
        with self._lock:
            self._snapshot = replace(self._snapshot, at_s=self._clock.wall(), **changes)  # type: ignore[arg-type]
            self._on_change(self._snapshot)

    # -- etcd ---------------------------------------------------------------------------------

    def _watch_etcd(self) -> None:
        assert self._open_store is not None
        while not self._closing.is_set():
            try:
                with self._open_store() as store:
                    self._poll(store)
            except CoordinationError as error:
                self._note_outage(error)
            self._clock.wait(self._closing, DASHBOARD_RECONNECT_S)

    def _poll(self, store: KeyValue) -> None:
        """Poll until closed, whether etcd answers or not: the store reconnects by itself."""
        while not self._closing.is_set():
            try:
                self._take(self._read(store))
            except CoordinationError as error:
                self._note_outage(error)
            self._clock.wait(self._closing, DASHBOARD_ETCD_S)

    def _read(self, store: KeyValue) -> JobView:
        assert self._keys is not None
        return read_job(store, self._keys, self._clock.wall())

    def _take(self, view: JobView) -> None:
        changes: dict[str, object] = {"view": view, "outage": None, "last_known": ()}
        if self._journals is None:  # journals have more detail
            self._log.add_changes(view)
            changes["events"] = self._log.events
        self._publish(**changes)

    def _note_outage(self, error: CoordinationError) -> None:
        before = self.snapshot
        since_s = before.outage.since_s if before.outage is not None else self._clock.wall()
        known = before.last_known
        if self._journals is not None:
            known = self._journals.last_known(self._clock.wall())
        if before.view is not None:  # it has nodes and incidents; the journals have a newer step
            known = known[:1]
        self._publish(outage=Outage(since_s, str(error.message)), last_known=known)

    # -- journals -----------------------------------------------------------------------------

    def _watch_journals(self) -> None:
        assert self._journals is not None
        while not self._closing.is_set():
            if self._journals.look():
                self._publish(
                    run_id=self.snapshot.run_id or self._journals.run_id,
                    events=self._log.events,
                    notes=self._journals.notes,
                )
            self._clock.wait(self._closing, DASHBOARD_JOURNALS_S)

    def _watch_charts(self) -> None:
        """Draw on a separate thread: drawing takes longer than an event may wait."""
        assert self._journals is not None
        while not self._closing.is_set():
            if self._journals.draw_if_due():
                self._publish(charts=self._journals.charts)
            self._clock.wait(self._closing, DASHBOARD_JOURNALS_S)
