"""Journals read back: every line that can be read, and a note on each that cannot.

Start with :func:`read_folder`, or :class:`JournalFolder` for one that still grows. What lines hold
is in docs/reference/events.md. Nothing in a journal raises: it may be cut, damaged, written by
another version, or hold anything that a script has put into an exception.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import msgspec

from elastic.telemetry.journal import SCHEMA

_CHUNK_BYTES = 1 << 24
_NUMBERS = (float, int)  # as JSON has them: type() takes a third of isinstance's time
_LONGEST_LINE = 1 << 20  # what is longer was not written by a journal
_TAIL_BYTES = 1 << 18
_TAIL_FILES = 64


class JournalRecord(msgspec.Struct, eq=False, gc=False):
    """One event of one process. (A struct: there may be millions, and each holds no cycle.)"""

    name: str  # in kebab case: "world-formed"
    writer: str  # which process wrote it; "": the line does not say
    seq: int
    time_s: float  # by the wall clock of its machine
    monotonic_s: float
    data: dict[str, Any]  # the whole line
    at_s: float = 0.0  # wall time on one clock for all nodes: elastic/telemetry/merging.py

    @property
    def node(self) -> str:
        """The name of the node that wrote it."""
        return str(self.data.get("node", "?"))

    def number(self, name: str, default: float = 0.0) -> float:
        """A finite number of the line, or ``default`` where there is none."""
        value: Any = self.data.get(name)
        if type(value) in _NUMBERS and math.isfinite(value):
            return float(value)
        return default

    def whole(self, name: str) -> int | None:
        """An integer of the line, or None."""
        value = self.data.get(name)
        return value if type(value) is int else None

    def text(self, name: str) -> str:
        """A text of the line, or ""."""
        value = self.data.get(name)
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

    A file is known by its inode, so that rotation, which renames it, repeats nothing.
    """

    folder: Path
    _files: dict[tuple[int, int], _File] = field(default_factory=dict)
    _schemas: Counter[int] = field(default_factory=Counter)
    _problems: dict[str, None] = field(default_factory=dict)

    def read_new(self) -> list[JournalRecord]:
        """What was written since the last call, file by file. A missing folder is empty."""
        records: list[JournalRecord] = []
        for path in self._paths():
            try:
                records += self._read(path)
            except OSError as error:
                self._problems.setdefault(f"{path.name} cannot be read: {error.strerror}")
        return records

    def read_tails(self, run_id: str) -> list[JournalRecord]:
        """The last lines of the files that were written last, without those of other runs: enough
        for the present state, and quick however long the run was."""
        records: list[JournalRecord] = []
        for path in sorted(self._paths(), key=_written_s)[-_TAIL_FILES:]:
            try:
                with path.open("rb") as stream:
                    first = _decoded_line(stream.readline(_LONGEST_LINE))
                    opened = self._record(first, path)
                    if opened is not None and opened.text("run_id") not in ("", "none", run_id):
                        continue
                    stream.seek(max(0, path.stat().st_size - _TAIL_BYTES))
                    lines = stream.read(_TAIL_BYTES).splitlines()
            except OSError as error:
                self._problems.setdefault(f"{path.name} cannot be read: {error.strerror}")
                continue
            # The first line and the last one may be cut: those are no JSON.
            records += [r for data in _decoded(lines) if (r := self._record(data, path))]
        return records

    def notes(self) -> list[str]:
        """What could not be read, and why."""
        notes = list(self._problems)
        for file in self._files.values():
            if file.corrupt:
                lines = "line is" if file.corrupt == 1 else "lines are"
                notes.append(
                    f"{file.path.name}: {file.corrupt} {lines} damaged or cut and left out, the "
                    f"first one line {file.first_corrupt}"
                )
            if file.rest:
                notes.append(
                    f"{file.path.name}: the last line was cut: its process was killed, or still "
                    "writes"
                )
        notes += [
            f"{count} journals have schema {schema}, this version reads {SCHEMA}: what it does "
            "not know is left out"
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
            if status.st_size < file.offset:  # not the file that it was
                file.offset = file.lines = 0
            stream.seek(file.offset)
            for lines in _lines(stream, file):
                records += self._records(lines, path, file)
        return records

    def _records(self, lines: Sequence[bytes], path: Path, file: _File) -> list[JournalRecord]:
        records: list[JournalRecord] = []
        for number, data in enumerate(_decoded(lines), file.lines + 1):
            record = self._record(data, path)
            if record is not None:
                records.append(record)
            elif lines[number - file.lines - 1].strip():
                file.corrupt += 1
                file.first_corrupt = file.first_corrupt or number
        file.lines += len(lines)
        return records

    def _record(self, data: Any, path: Path) -> JournalRecord | None:
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
    """Everything in a folder of journals, unordered, and what could not be read."""
    journals = JournalFolder(Path(folder))
    return journals.read_new(), journals.notes()


_decode = msgspec.json.Decoder().decode


def _written_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # gone since the folder was listed
        return 0.0


def _is_time(value: Any) -> TypeGuard[float]:
    return type(value) in _NUMBERS and abs(value) < 1e11


def _decoded(lines: Sequence[bytes]) -> list[Any]:
    """What each line says; None for one that is not JSON, or too long."""
    try:  # at once: almost always all of them can be read
        if max(map(len, lines), default=0) <= _LONGEST_LINE:
            return [_decode(line) for line in lines]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    return [_decoded_line(line) for line in lines]


def _decoded_line(line: bytes) -> Any:
    if len(line) > _LONGEST_LINE:
        return None
    try:
        return _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _lines(stream: Any, file: _File) -> Iterator[list[bytes]]:
    """Complete lines from the offset on; what comes after the last one is left for later."""
    rest = b""
    while chunk := stream.read(_CHUNK_BYTES):
        data = rest + chunk
        end = data.rfind(b"\n") + 1
        rest = data[end:]
        file.offset += end
        yield data[:end].splitlines()
    file.rest = len(rest)
