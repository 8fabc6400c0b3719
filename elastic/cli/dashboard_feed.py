"""What the dashboard shows: snapshots of a job, from etcd and from journals."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastic.cli.last_known import changes_of, last_known
from elastic.cli.status import SCHEMA, document, ranks_of
from elastic.cli.view import JobCondition, JobView, incident, read_job, sentence
from elastic.errors import SYSTEM_CLOCK, Clock, CoordinationError
from elastic.membership.records import Keys, Node
from elastic.report.model import ReportLimits, RunReport, TimelineLimits, report_of
from elastic.report.render import Rows, facts_of, page
from elastic.store.keyvalue import KeyValue
from elastic.telemetry.log import duration, get_logger, printable
from elastic.telemetry.reader import UNNAMED_RUNS, JournalFolder, JournalRecord, merge
from elastic.tuning.intervals import DASHBOARD_DRAIN_S

# `elastic dashboard` polls etcd this often, once for all of its clients, so that a page shows a
# loss within two seconds.
DASHBOARD_ETCD_S = 1.0
# `elastic dashboard` checks the journals for new lines this often.
DASHBOARD_JOURNALS_S = 0.5
# `elastic dashboard` evaluates the journals this often; after a change of the world, at once.
DASHBOARD_REPORT_S = 15.0
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
    report: RunReport | None = None  # from the journals; None: not evaluated yet, or no events
    notes: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """The state: a value of :class:`JobCondition`, or "unknown"."""
        return self.view.state.value if self.view is not None else UNKNOWN


# ----------------------------------------------------------------------------
# A snapshot as a page: what the template page.html shows of a live job, beside its report. Pure.

_MAX_NODES = 100  # rows
_MAX_EVENTS = 50
_MAX_INCIDENTS = 10
_MAX_NOTES = 10
_GOOD = (JobCondition.TRAINING, JobCondition.SUCCEEDED)
_BAD = (JobCondition.FAILED, JobCondition.DOWN, JobCondition.PAUSED)
_TIME = re.compile(r"⟦(\d{1,12}\.\d{3})⟧")


def live_page(snapshot: JobSnapshot, server: str) -> str:
    """The page, readable without JavaScript. ``server``: identifies this start of the server."""
    view, report = snapshot.view, snapshot.report
    nodes = [*view.members, *view.joining] if view is not None else []
    broken = view.incidents[-_MAX_INCIDENTS:] if view is not None else ()
    generation = view.world.generation if view is not None and view.world is not None else None
    rows = Rows([_node(view, n) for n in nodes[:_MAX_NODES] if view], _MAX_NODES)
    rows.hidden = max(0, len(nodes) - _MAX_NODES)
    live = {
        "server": server,
        "at_s": snapshot.at_s,
        "state": snapshot.state if view is not None or report is None else "from journals",
        "spoken": snapshot.state + (f", generation {generation}" if generation else ""),
        "mood": _mood(snapshot),
        "sentence": list(_sentence(snapshot)),
        "outage": snapshot.outage,
        "view_at_s": view.at_s if view is not None else None,
        "last_known": snapshot.last_known,
        "facts": list(_facts(snapshot)),
        "nodes": rows,
        "no_nodes": "No node is alive." if view is not None else "",
        "incidents": [
            {
                "at_s": breakage.time_s,
                "generation": breakage.generation,
                "step": breakage.step,
                "what": incident(breakage),
                "verdict": breakage.verdict,
                "response": breakage.response,
            }
            for breakage in reversed(broken)
        ],
        "no_report": "The journals have no events of this run yet."
        if snapshot.reads_journals
        else "Charts are drawn from the journals of the job: elastic dashboard --journal FOLDER",
        "events": list(reversed(snapshot.events[-_MAX_EVENTS:])),
        "notes": [
            *(snapshot.notes if report is None else ()),
            *(view.notes if view is not None else ()),
        ][:_MAX_NOTES],
    }
    return page(report, live, title=printable(snapshot.run_id or "an unnamed run", 100))


def _mood(snapshot: JobSnapshot) -> str:
    state = snapshot.view.state if snapshot.view is not None else None
    if state in _BAD:
        return "bad"
    return "good" if state in _GOOD and snapshot.outage is None else ""


def _sentence(snapshot: JobSnapshot) -> Iterator[tuple[str, float | None]]:
    """The status sentence in pieces, each with the time that follows it, whose age the page
    updates."""
    view, report = snapshot.view, snapshot.report
    if view is not None:
        pieces = _TIME.split(sentence(view, lambda at_s: f"⟦{at_s:.3f}⟧"))
        times = [float(text) for text in pieces[1::2]]
        yield from zip(pieces[::2], [*times, None], strict=True)
    elif snapshot.uses_etcd:
        yield "etcd has not answered yet", None
    else:
        yield f"from the journals only: {report.sentence if report else 'no events yet'}", None


@dataclass(frozen=True)
class Fact:
    """A tile of the page."""

    name: str
    text: str
    at_s: float | None = None  # shown as an age, behind the text
    value: int = 0  # of a progress bar
    of: int | None = None


def _facts(snapshot: JobSnapshot) -> Iterator[Fact]:
    view, report = snapshot.view, snapshot.report
    if view is None:
        pairs = facts_of(report) if report is not None else ()
        yield from (Fact(name, text) for name, text in pairs)
        return
    progress, world = view.progress, view.world
    if (step := view.step) is not None:
        planned = progress.planned_steps if progress is not None else None
        of = f" of {planned}" if planned is not None else ""
        yield Fact("Step", f"{step}{of}{' or later' * view.is_step_old}", None, step, planned)
    if (rate := view.steps_per_s) is not None:
        yield Fact("Rate", f"{rate:.3g} steps/s")
    if (eta_s := view.eta_s) is not None:
        yield Fact("Time left", f"about {duration(eta_s)}")
    elif view.state is JobCondition.TRAINING:
        yield Fact("Time left", "unknown")
    if report is not None:  # it has more detail than the leader's estimate
        covers, goodput = report.goodput.duration_s, report.goodput.breakdown.goodput
        yield Fact("Goodput", f"{goodput:.1%} of {duration(covers)}, from the journals")
    elif (estimate := view.goodput) is not None:
        since_s = (progress.goodput_since_s if progress is not None else None) or view.at_s
        covers = max(0.0, view.at_s - since_s)
        yield Fact("Goodput", f"{estimate:.1%} of {duration(covers)}, an estimate")
    if progress is not None and progress.checkpoint_step is not None:
        saved = f"step {progress.checkpoint_step}"
        yield Fact("Last checkpoint", saved, progress.checkpoint_at_s)
    if world is not None:
        yield Fact("Generation", str(world.generation), world.time_s)
        allowed = f"{world.min_nodes} to {world.max_nodes} allowed"
        yield Fact("Nodes", f"{len(view.training)} ({allowed})")
        yield Fact("Workers", str(world.size))
        yield Fact("Last change", printable(world.reason, 200))


def _node(view: JobView, node: Node) -> dict[str, Any]:
    heartbeat = view.heartbeat_of(node)
    return {
        "name": node.name,
        "is_leader": view.leader is not None and view.leader.node_id == node.node_id,
        "ranks": ranks_of(view, node),
        "state": view.state_of(node),
        "generation": node.running.generation if node.running is not None else None,
        "step": heartbeat.step,
        "heard_at_s": view.at_s - heartbeat.age_s if heartbeat.age_s is not None else None,
        "is_late": heartbeat.is_late,
        "joined_at_s": node.joined_at_s,
        "address": node.address,
    }


# ----------------------------------------------------------------------------
# Documents of ``/api/status`` and ``/api/events``: docs/reference/status.md lists the fields.


def status_document(snapshot: JobSnapshot) -> dict[str, Any]:
    """The document of ``elastic status -o json`` with the server's additional fields."""
    view, report, outage = snapshot.view, snapshot.report, snapshot.outage
    status = document(view) if view is not None else _unknown(snapshot)
    status["source"] = {
        "asks_etcd": snapshot.uses_etcd,
        "view_age_s": round(max(0.0, snapshot.at_s - view.at_s), 3) if view is not None else None,
        "outage": None
        if outage is None
        else {"since": round(outage.since_s, 3), "reason": outage.reason[:1000]},
        "last_known": [line[:1000] for line in snapshot.last_known],
        "reads_journals": snapshot.reads_journals,
        "journal_goodput": round(report.goodput.breakdown.goodput, 6)
        if report is not None
        else None,
        "journal_notes": [note[:1000] for note in snapshot.notes],
    }
    return status


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
# Follows the journals of a job: events immediately, the report when it is due.

# The report is made again immediately after these events.
_URGENT = frozenset({"world-formed", "recovered", "job-ended"})
_REPORT_INTERVALS = 10  # wait ten times as long as a report takes: at most 1/10 of a core
# A page is fetched every second: its timeline is coarser than that of a report.
_LIMITS = ReportLimits(timeline=TimelineLimits(segments=400), curves=1)


class JournalFeed:
    """Follows one folder, on one thread. ``run_id``: "" selects the run that began last."""

    def __init__(
        self, folder: Path, run_id: str, log: EventLog, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._folder = folder
        self._run_id = run_id
        self._log = log
        self._clock = clock
        self._reader = JournalFolder(folder)
        self._records: list[JournalRecord] = []
        self._runs: dict[str, str] = {}  # by writer
        self._is_due = False  # there are new records for the report
        self._due_s = float("-inf")
        self.notes: tuple[str, ...] = ()  # on files that could not be read
        self.report: RunReport | None = None

    @property
    def run_id(self) -> str:
        """The requested run, or the run of the journal opened last."""
        named = [run for run in self._runs.values() if run not in UNNAMED_RUNS]
        return self._run_id or (named[-1] if named else "")

    def last_known(self, now_s: float) -> list[str]:
        """The last known state according to the journals, as lines of text."""
        return last_known(str(self._folder), self._run_id, now_s)

    def look(self) -> bool:
        """Read new events; returns whether there were any."""
        new = self._reader.read_new()
        for record in new:
            if record.name == "journal-opened":
                self._runs[record.writer] = record.text("run_id")
        own = [r for r in new if self._runs.get(r.writer, "") in (*UNNAMED_RUNS, self.run_id)]
        self._log.add_records(own)
        notes = tuple(self._reader.notes(is_growing=True))
        is_news = bool(own) or notes != self.notes
        self.notes = notes
        self._records += own
        self._is_due |= bool(own)
        if any(record.name in _URGENT for record in own):
            self._due_s = float("-inf")
        return is_news

    def report_if_due(self) -> bool:
        """Make the report again if there are new events for it; returns whether it did."""
        began_s = self._clock.monotonic()
        if not self._is_due or began_s < self._due_s:
            return False
        self._is_due = False
        report = report_of(merge(self._records, self.notes), self.run_id or None, _LIMITS)
        self.report = report if report.goodput.nodes else None
        now_s = self._clock.monotonic()
        self._due_s = now_s + max(DASHBOARD_REPORT_S, _REPORT_INTERVALS * (now_s - began_s))
        return True


# ----------------------------------------------------------------------------
# Watches a job on behalf of all clients of the page.
#
# One thread reads etcd, and one the journals.

OpenStore = Callable[[], AbstractContextManager[KeyValue]]


class JobFeed:
    """Watches from ``start`` to ``close``. ``on_error`` gets the exception that ended a thread.

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
        on_error: Callable[[BaseException], object],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._keys = keys
        self._open_store = open_store
        self._journals = journals
        self._log = log
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
            )
            if is_used
        ]

    @property
    def snapshot(self) -> JobSnapshot:
        """The newest snapshot."""
        with self._lock:
            return self._snapshot

    def current(self) -> JobSnapshot:
        """The newest snapshot, as of now: ages are relative to its time."""
        return replace(self.snapshot, at_s=self._clock.wall())

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

        A report, and connecting to an etcd that does not answer, take longer than a user who
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
        with self._lock:
            self._snapshot = replace(self._snapshot, at_s=self._clock.wall(), **changes)  # type: ignore[arg-type]

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
            if self._journals.report_if_due():
                self._publish(report=self._journals.report)
            self._clock.wait(self._closing, DASHBOARD_JOURNALS_S)
