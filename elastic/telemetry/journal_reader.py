"""Reads journals: every readable line, and a note on each unreadable one.

Start with :func:`read_folder`, or :class:`JournalFolder` for one that still grows. The fields of
lines are in docs/reference/events.md. Nothing in a journal raises: it may be truncated, damaged,
written by another version, or contain arbitrary text from a script's exception.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeGuard

import msgspec
from msgspec import UNSET, UnsetType

from elastic.telemetry.journal import SCHEMA

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
    at_s: float = 0.0  # wall time on one clock for all nodes: elastic/telemetry/merging.py

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
        """The last lines of the most recently written files, without those of other runs: enough
        for the current state, and fast for runs of any length."""
        records: list[JournalRecord] = []
        for path in sorted(self._paths(), key=_written_s)[-_TAIL_FILES:]:
            try:
                with path.open("rb") as stream:
                    opened = self._record(stream.readline(_LONGEST_LINE), path)
                    if opened is not None and opened.text("run_id") not in ("", "none", run_id):
                        continue
                    stream.seek(max(0, path.stat().st_size - _TAIL_BYTES))
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
