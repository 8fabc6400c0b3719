"""The last events of a job, numbered, one line each: from its journals, else from etcd.

A thousand ranks record the same recovery: only the first event is kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable

from elastic.cli.dashboard.feed.snapshot import JobEvent
from elastic.cli.observe.etcd_changes import changes_of
from elastic.cli.observe.job_view import JobView
from elastic.cli.observe.printable import duration, printable
from elastic.telemetry.journal_reader import JournalRecord

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
            took = duration(max(0.0, record.number("duration_s")))
            return f"training resumed from step {step} after {took}"
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
