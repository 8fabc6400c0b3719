"""Reads journals, and merges those of several nodes."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeGuard

import msgspec
from msgspec import UNSET, UnsetType

from elastic.telemetry.journal import SCHEMA

# A wall clock that deviates by this from the monotonic one of its machine has been set.
CLOCK_SET_S = 1.0
# Nodes record that they have joined a world within this of each other: the leader pushes it.
JOINED_TOGETHER_S = 1.0
# Ranks record that they have entered it within this: they build their group and load the state.
ENTERED_TOGETHER_S = 20.0
# Agents record the end of the job within this: their workers end first.
ENDED_TOGETHER_S = 20.0
# A node whose journal ends this long before the run, without a last event, is named in a note.
SILENT_NODE_S = 10.0
_MAX_MISSING = 20  # nodes in a note

# ----------------------------------------------------------------------------
# Reads journals: every readable line, and a note on each unreadable one.
#
# Start with :func:`read_folder`, or :class:`JournalFolder` for one that still grows. The fields of
# lines are in docs/reference/events.md. Nothing in a journal raises: it may be truncated, damaged,
# written by another version, or contain arbitrary text from a script's exception.

_CHUNK_BYTES = 1 << 24
_NUMBERS = (float, int)  # as JSON has them: type() takes a third of isinstance's time
_LONGEST_LINE = 1 << 20  # longer than any line that a journal writes
_LATEST_TIME = 1e11  # of a clock: the year 5138
_TAIL_BYTES = 1 << 18
_TAIL_FILES = 64
_WINDOW: Literal["rank-times"] = "rank-times"
_WINDOW_START = b'{"event": "rank-times", '  # as the journal writes them
_DURATIONS = (
    *("duration_s", "productive_s", "data_s", "checkpoint_s", "evaluation_s", "open_s"),
    "collective_s",
)


class Window(msgspec.Struct, gc=False, kw_only=True, forbid_unknown_fields=True):
    """A ``rank-times`` line: nine of ten lines of a long run.

    Decoding one takes a third of the time of a dictionary. The fields are those that this version
    writes: a line with other fields or types is read as a dictionary.
    """

    event: Literal["rank-times"]
    seq: int
    time: float
    monotonic: float
    writer: str
    node: str
    node_id: str | UnsetType = UNSET
    rank: int | UnsetType = UNSET
    generation: int | None
    step: int | None
    steps: int | None
    duration_s: float
    productive_s: float
    data_s: float
    checkpoint_s: float
    evaluation_s: float
    open_s: float
    collective_s: float
    ended: str


class JournalRecord(msgspec.Struct, eq=False, gc=False):
    """One event of one process. (A struct: there may be millions, and each holds no cycle.)"""

    name: str  # in kebab case: "world-formed"
    writer: str  # the process that wrote it; "": unknown
    seq: int
    time_s: float  # by the wall clock of its machine
    monotonic_s: float
    line: dict[str, Any] | Window
    at_s: float = 0.0  # wall time on one clock for all nodes: elastic/telemetry/reader.py

    @property
    def data(self) -> dict[str, Any]:
        """The whole line."""
        line = self.line
        if isinstance(line, Window):
            fields: dict[str, Any] = msgspec.to_builtins(line)
            return fields
        return line

    @property
    def window(self) -> Window:
        """The line as a window; a field that is missing or not a number is 0."""
        line = self.line
        return line if isinstance(line, Window) else self._read_window()

    def _read_window(self) -> Window:
        rank, durations = self.whole("rank"), {name: self.number(name) for name in _DURATIONS}
        return Window(
            event=_WINDOW,
            seq=self.seq,
            time=self.time_s,
            monotonic=self.monotonic_s,
            writer=self.writer,
            node=self.node,
            node_id=self.text("node_id") or UNSET,
            rank=UNSET if rank is None else rank,
            generation=self.whole("generation"),
            step=self.whole("step"),
            steps=self.whole("steps"),
            ended=self.text("ended"),
            **durations,
        )

    @property
    def node(self) -> str:
        """The name of the node that wrote the line."""
        line = self.line
        return line.node if isinstance(line, Window) else str(line.get("node", "?"))

    def _value(self, name: str) -> Any:
        line = self.line
        return getattr(line, name, None) if isinstance(line, Window) else line.get(name)

    def number(self, name: str, default: float = 0.0) -> float:
        """A field that is a finite number, else ``default``."""
        value = self._value(name)
        if type(value) in _NUMBERS and math.isfinite(value):
            return float(value)
        return default

    def whole(self, name: str) -> int | None:
        """A field that is an integer, else None."""
        value = self._value(name)
        return value if type(value) is int else None

    def text(self, name: str) -> str:
        """A field that is a string, else ""."""
        value = self._value(name)
        return value if isinstance(value, str) else ""


@dataclass
class _File:
    path: Path
    offset: int = 0
    lines: int = 0
    corrupt: int = 0
    first_corrupt: int = 0
    rest: int = 0  # bytes after the last complete line


@dataclass
class JournalFolder:
    """The journals of a folder while they grow: each line is read once.

    Files are identified by inode, so that rotation, which renames them, repeats nothing.
    """

    folder: Path
    _files: dict[tuple[int, int], _File] = field(default_factory=dict)
    _schemas: Counter[int] = field(default_factory=Counter)
    _problems: dict[str, None] = field(default_factory=dict)

    def read_new(self) -> list[JournalRecord]:
        """Records written since the last call, file by file. A missing folder is empty."""
        records: list[JournalRecord] = []
        for path in self._paths():
            try:
                records += self._read(path)
            except OSError as error:
                self._problems.setdefault(f"{path.name} cannot be read: {error.strerror}")
        return records

    def read_tails(self, run_id: str) -> list[JournalRecord]:
        """The first and the last lines of the most recently written files, without those of other
        runs: enough for the current state, and fast for runs of any length."""
        records: list[JournalRecord] = []
        for path in sorted(self._paths(), key=_written_s)[-_TAIL_FILES:]:
            try:
                with path.open("rb") as stream:
                    opened = self._record(stream.readline(_LONGEST_LINE), path)
                    if opened is not None and opened.text("run_id") not in ("", "none", run_id):
                        continue
                    tail_from = max(0, path.stat().st_size - _TAIL_BYTES)
                    if opened is not None and tail_from > 0:
                        records.append(opened)
                    stream.seek(tail_from)
                    lines = stream.read(_TAIL_BYTES).splitlines()
            except OSError as error:
                self._problems.setdefault(f"{path.name} cannot be read: {error.strerror}")
                continue
            # The first and the last line may be truncated, and then are not JSON.
            records += [r for line in lines if (r := self._record(line, path))]
        return records

    def notes(self, *, is_growing: bool = False) -> list[str]:
        """Notes on lines and files that could not be read, and why.

        With `is_growing`, a truncated last line is not noted: it is still being written.
        """
        notes = list(self._problems)
        for file in self._files.values():
            if file.corrupt:
                lines = "line is" if file.corrupt == 1 else "lines are"
                notes.append(
                    f"{file.path.name}: {file.corrupt} {lines} damaged or truncated and skipped, "
                    f"the first one is line {file.first_corrupt}"
                )
            if file.rest and not is_growing:
                notes.append(
                    f"{file.path.name}: the last line is truncated: its process was killed, or is "
                    "still writing"
                )
        notes += [
            f"{count} journals have schema {schema}, this version reads {SCHEMA}: unknown fields "
            "are ignored"
            for schema, count in sorted(self._schemas.items())
        ]
        return notes

    def _paths(self) -> list[Path]:
        try:
            return sorted(path for path in self.folder.glob("*.jsonl") if path.is_file())
        except OSError as error:
            self._problems.setdefault(f"{self.folder} cannot be listed: {error.strerror}")
            return []

    def _read(self, path: Path) -> list[JournalRecord]:
        records: list[JournalRecord] = []
        with path.open("rb") as stream:
            status = path.stat()
            file = self._files.setdefault((status.st_dev, status.st_ino), _File(path))
            file.path = path
            if status.st_size < file.offset:  # the file was truncated or replaced
                file.offset = file.lines = 0
            stream.seek(file.offset)
            for lines in _lines(stream, file):
                records += self._records(lines, path, file)
        return records

    def _records(self, lines: Sequence[bytes], path: Path, file: _File) -> list[JournalRecord]:
        records: list[JournalRecord] = []
        append, read = records.append, self._record
        for number, line in enumerate(lines, file.lines + 1):
            record = read(line, path)
            if record is not None:
                append(record)
            elif line.strip():
                file.corrupt += 1
                file.first_corrupt = file.first_corrupt or number
        file.lines += len(lines)
        return records

    def _record(self, line: bytes, path: Path) -> JournalRecord | None:
        """The record, or None if the line cannot be read."""
        if line.startswith(_WINDOW_START) and (record := _window_record(line)) is not None:
            return record
        data = _decoded(line)
        if type(data) is not dict:
            return None
        get = data.get
        name, time_s, monotonic_s = get("event"), get("time"), get("monotonic")
        if not (type(name) is str and _is_time(time_s) and _is_time(monotonic_s)):
            return None
        writer, seq = get("writer"), get("seq")
        if name == "journal-opened" and (schema := get("schema")) != SCHEMA:
            self._schemas[schema if isinstance(schema, int) else -1] += 1
        return JournalRecord(
            name,
            writer if type(writer) is str else path.stem,
            seq if type(seq) is int else -1,
            float(time_s),
            float(monotonic_s),
            data,
        )


def read_folder(folder: str | Path) -> tuple[list[JournalRecord], list[str]]:
    """All records in a folder of journals, unordered, and notes on what could not be read."""
    journals = JournalFolder(Path(folder))
    return journals.read_new(), journals.notes()


_decode = msgspec.json.Decoder().decode
_decode_window = msgspec.json.Decoder(Window).decode
_NOT_DECODED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def _written_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # removed since the folder was listed
        return 0.0


def _is_time(value: Any) -> TypeGuard[float]:
    return type(value) in _NUMBERS and abs(value) < _LATEST_TIME


def _decoded(line: bytes) -> Any:
    """The decoded line; None if it is not JSON or too long."""
    if len(line) > _LONGEST_LINE:
        return None
    try:
        return _decode(line)
    except _NOT_DECODED:
        return None


def _window_record(line: bytes) -> JournalRecord | None:
    """The record, or None if the line is damaged or has other fields than this version writes."""
    try:
        window = _decode_window(line)
    except _NOT_DECODED:
        return None
    time_s, monotonic_s = window.time, window.monotonic
    is_possible = abs(time_s) < _LATEST_TIME and abs(monotonic_s) < _LATEST_TIME
    if not is_possible or len(line) > _LONGEST_LINE:
        return None
    return JournalRecord(_WINDOW, window.writer, window.seq, time_s, monotonic_s, window)


def _lines(stream: Any, file: _File) -> Iterator[list[bytes]]:
    """Complete lines from the offset on; an incomplete one is left for later."""
    rest = b""
    while chunk := stream.read(_CHUNK_BYTES):
        data = rest + chunk
        end = data.rfind(b"\n") + 1
        rest = data[end:]
        file.offset += end
        yield data[:end].splitlines()
    file.rest = len(rest)


# ----------------------------------------------------------------------------
# The journals of a run on one clock, in order: :func:`merge`.
#
# Processes of one machine share a monotonic clock, so their order is certain, even if the wall
# clock was set. Machines are compared at events that occur on all of them at once: ranks agree on
# a world's state with a collective, whose end each records as ``world-joined``.

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
    notes += _missing_nodes(writers)
    return RunJournal(chosen, writers, tuple(notes))


def _missing_nodes(writers: Iterable[JournalWriter]) -> list[str]:
    """A note on nodes of the run's worlds whose journals are elsewhere."""
    present, members = set[str](), set[str]()
    for writer in writers:
        present.add(writer.node)
        for record in writer.records:
            if record.name == "world-formed" and isinstance(record.data.get("nodes"), list):
                members.update(n for n in record.data["nodes"] if isinstance(n, str))
    missing = sorted(members - present)
    if not missing:
        return []
    shown = ", ".join(missing[:_MAX_MISSING])
    more = f" and {len(missing) - _MAX_MISSING} more" if len(missing) > _MAX_MISSING else ""
    nodes_are = "node" if len(missing) == 1 else "nodes"
    return [
        f"incomplete: {nodes_are} {shown}{more} missing: their journals are in other folders, such "
        "as those of their machines; copy them into this one"
    ]


def merge(records: Iterable[JournalRecord], notes: Sequence[str] = ()) -> MergedJournal:
    """Put all records on one clock (``at_s``) and in order. Notes each correction."""
    writers = _by_writer(records)
    all_notes = list(notes)
    all_notes += _gaps(writers)
    all_notes += _place(writers)
    if writers:
        all_notes += _silent(writers)
    return MergedJournal(tuple(writers), tuple(all_notes))


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
