"""The journals of a run on one clock, in order: :func:`merge`.

Processes of one machine share a monotonic clock, so their order is certain, even if the wall
clock was set. Machines are compared at events that occur on all of them at once: ranks agree on a
world's state with a collective, whose end each records as ``world-joined``.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter

from elastic.telemetry.journal_reader import JournalRecord
from elastic.tuning.worker_intervals import (
    CLOCK_SET_S,
    ENDED_TOGETHER_S,
    ENTERED_TOGETHER_S,
    JOINED_TOGETHER_S,
    SILENT_NODE_S,
)

# Events that all ranks or nodes write at once, and their maximum distance without clock skew.
_TOGETHER = (
    ("world-joined", JOINED_TOGETHER_S),
    ("world-entered", ENTERED_TOGETHER_S),
    ("job-ended", ENDED_TOGETHER_S),
)
UNNAMED_RUNS = ("", "none")  # torchrun's run id of a job without one is "none"
_MAX_FOR_A_MEDIAN = 2000
_LAST_LINES = frozenset({"journal-closed", "node-parked", "job-ended", "node-leaving"})


@dataclass
class JournalWriter:
    """One process and its records, oldest first."""

    writer: str
    records: list[JournalRecord] = field(default_factory=list)

    @property
    def node(self) -> str:
        return self.records[0].node

    @property
    def opened(self) -> JournalRecord | None:
        """Its first line, which identifies the process; None if it is lost."""
        return next((r for r in self.records if r.name == "journal-opened"), None)

    @property
    def role(self) -> str:
        """ "agent" or "worker"."""
        role = self.opened.text("role") if self.opened is not None else ""
        return role or ("worker" if any("rank" in r.data for r in self.records) else "agent")

    @property
    def run_id(self) -> str:
        """The run id if this process knows it, else ""."""
        return self.opened.text("run_id") if self.opened is not None else ""

    @property
    def clock(self) -> str:
        """Identifies the monotonic clock, which writers of one boot share."""
        boot_id = self.opened.text("boot_id") if self.opened is not None else ""
        return boot_id or f"writer {self.writer}"


@dataclass(frozen=True)
class MergedJournal:
    """A run's events in order of time, and notes on problems."""

    writers: tuple[JournalWriter, ...]
    notes: tuple[str, ...]

    @cached_property
    def records(self) -> tuple[JournalRecord, ...]:
        """All events, in order of time."""
        return tuple(_in_order(r for w in self.writers for r in w.records))


@dataclass(frozen=True)
class RunJournal:
    """The part of a merged journal that belongs to one run."""

    run_id: str
    writers: tuple[JournalWriter, ...]
    notes: tuple[str, ...]

    @property
    def records(self) -> list[JournalRecord]:
        """All events, in order of time."""
        return _in_order(r for w in self.writers for r in w.records)

    def records_without(self, name: str) -> list[JournalRecord]:
        """All events except those of a kind, in order of time."""
        return _in_order(r for w in self.writers for r in w.records if r.name != name)


def run_of(journal: MergedJournal, run_id: str | None = None) -> RunJournal:
    """Select ``run_id``, else the run that began last. A writer without a run id, such as a worker
    of a job whose name torchrun chose, belongs to each."""
    known = list(dict.fromkeys(w.run_id for w in journal.writers if w.run_id not in UNNAMED_RUNS))
    chosen = run_id if run_id is not None else (known[-1] if known else "")
    notes = list(journal.notes)
    if run_id is None and len(known) > 1:
        others = ", ".join(known[:-1][:5])
        notes.append(f"the folder holds {len(known)} runs: this is {chosen}; others: {others}")
    writers = tuple(w for w in journal.writers if w.run_id == chosen or w.run_id in UNNAMED_RUNS)
    return RunJournal(chosen, writers, tuple(notes))


def merge(records: Iterable[JournalRecord], notes: Sequence[str] = ()) -> MergedJournal:
    """Put all records on one clock (``at_s``) and in order. Notes each correction."""
    writers = _by_writer(records)
    found = list(notes)
    found += _gaps(writers)
    found += _place(writers)
    if writers:
        found += _silent(writers)
    return MergedJournal(tuple(writers), tuple(found))


def _in_order(records: Iterable[JournalRecord]) -> list[JournalRecord]:
    return sorted(records, key=attrgetter("at_s"))


def _by_writer(records: Iterable[JournalRecord]) -> list[JournalWriter]:
    writers: dict[str, JournalWriter] = {}
    for record in records:
        known = writers.get(record.writer)
        if known is None:
            known = writers[record.writer] = JournalWriter(record.writer)
        known.records.append(record)
    for writer in writers.values():
        # Two sorts are faster than one by both keys: files are almost always in order.
        writer.records.sort(key=attrgetter("seq"))
        writer.records.sort(key=attrgetter("monotonic_s"))
    return sorted(writers.values(), key=lambda w: w.records[0].time_s)


def _gaps(writers: Iterable[JournalWriter]) -> list[str]:
    """Missing sequence numbers: removed by rotation, or lost with a full disk or a damaged line."""
    notes = []
    for writer in writers:
        known = {r.seq for r in writer.records if r.seq >= 0}
        missing = max(known) + 1 - len(known) if known else 0
        if missing:
            events = "event is" if missing == 1 else "events are"
            notes.append(
                f"{_process(writer)}: {missing} {events} missing: removed by rotation, lost with a "
                "full disk, or damaged"
            )
    return notes


def _process(writer: JournalWriter) -> str:
    pid = writer.opened.whole("pid") if writer.opened is not None else None
    return f"{writer.node} ({writer.role}{f', pid {pid}' if pid is not None else ''})"


# Clocks ------------------------------------------------------------------------------------------


def _place(writers: Sequence[JournalWriter]) -> list[str]:
    """Set ``at_s`` of every record."""
    clocks: dict[str, list[JournalWriter]] = defaultdict(list)
    for writer in writers:
        clocks[writer.clock].append(writer)
    offsets, notes = {}, []
    for clock, of_clock in clocks.items():
        own = [[r.time_s - r.monotonic_s for r in w.records] for w in of_clock]
        offsets[clock] = statistics.median([_median(of_writer) for of_writer in own])
        notes += _set_clocks(of_clock, own, offsets[clock])
    skews = _skews(clocks, offsets)
    for clock, skew_s in skews.items():
        nodes = ", ".join(sorted({w.node for w in clocks[clock]}))
        notes.append(
            f"the clock of {nodes} is {abs(skew_s):.1f} s {'ahead' if skew_s > 0 else 'behind'}: "
            "its times are corrected"
        )
    for clock, of_clock in clocks.items():
        offset_s = offsets[clock] - skews.get(clock, 0.0)
        for writer in of_clock:
            for record in writer.records:
                record.at_s = record.monotonic_s + offset_s
    return notes


def _set_clocks(
    writers: Sequence[JournalWriter], offsets: Sequence[Sequence[float]], offset_s: float
) -> list[str]:
    moved_s = max(
        max(max(of_writer) - offset_s, offset_s - min(of_writer)) for of_writer in offsets
    )
    if moved_s < CLOCK_SET_S:
        return []
    nodes = ", ".join(sorted({w.node for w in writers}))
    return [
        f"the wall clock of {nodes} was set by {moved_s:.1f} s during the run: its events are "
        "ordered by its monotonic clock"
    ]


def _skews(clocks: dict[str, list[JournalWriter]], offsets: dict[str, float]) -> dict[str, float]:
    """How far each clock is ahead of the one with most lines, if that exceeds the tolerance."""
    if len(clocks) < 2:
        return {}
    reference = max(clocks, key=lambda c: sum(len(w.records) for w in clocks[c]))
    seen = {clock: _together(clocks[clock], offsets[clock]) for clock in clocks}
    skews = {}
    for clock in clocks.keys() - {reference}:
        for name, tolerance_s in _TOGETHER:
            common = [
                seen[clock][key] - seen[reference][key]
                for key in seen[clock].keys() & seen[reference].keys()
                if key[0] == name
            ]
            if common:
                skew_s = statistics.median(common)
                if abs(skew_s) > tolerance_s:
                    skews[clock] = skew_s
                break
    return skews


def _together(
    writers: Iterable[JournalWriter], offset_s: float
) -> dict[tuple[str, str, int | None], float]:
    names = {name for name, _ in _TOGETHER}
    times: dict[tuple[str, str, int | None], float] = {}
    for writer in writers:
        for record in writer.records:
            if record.name in names:
                key = (record.name, writer.run_id, record.whole("generation"))
                times.setdefault(key, record.monotonic_s + offset_s)
    return times


def _median(values: Sequence[float]) -> float:
    """The median of a sample of the values: clocks are rarely set."""
    return statistics.median(values[:: max(1, len(values) // _MAX_FOR_A_MEDIAN)])


# Nodes that were lost ----------------------------------------------------------------------------


def _silent(writers: Sequence[JournalWriter]) -> list[str]:
    """Notes on nodes whose agents stop without an event while others continue. A node's last line
    may be a worker's: workers write more often than their agent, and may outlive it."""
    last_s = max(w.records[-1].at_s for w in writers)
    newest_s: dict[str, float] = {}
    ends: dict[str, tuple[float, bool]] = {}
    for writer in writers:
        newest = writer.records[-1]
        newest_s[writer.node] = max(newest.at_s, newest_s.get(writer.node, float("-inf")))
        if writer.role != "agent":
            continue
        has_ended = any(r.name in _LAST_LINES for r in writer.records[-3:])
        if newest.at_s >= ends.get(writer.node, (float("-inf"), False))[0]:
            ends[writer.node] = (newest.at_s, has_ended)
    losses = _in_order(r for w in writers for r in w.records if r.name == "node-lost")
    lost = {r.text("lost"): r.text("reason") for r in losses}
    notes = []
    for node, (_, has_ended) in sorted(ends.items()):
        end_s = newest_s[node]
        if has_ended or (node not in lost and last_s - end_s < SILENT_NODE_S):
            continue
        why = f": it was lost ({lost[node]})" if node in lost else ""
        notes.append(f"{node} wrote nothing in the last {last_s - end_s:.1f} s of the run{why}")
    return notes
