"""The journal: every event as a JSON line in one file per process, and as a log line.

Each process appends to ``folder/<node>-<pid>.jsonl``, in the folder ``ELASTIC_JOURNAL`` or, by
default, in the user's state folder (:mod:`elastic.telemetry.runs`), from which the files move
beside the checkpoints as soon as their folder is known. One line is one ``write`` on a file opened
for appending. A line truncated by a kill or a full disk is not
valid JSON, and the next one begins on a new line. docs/reference/events.md lists the fields of
lines; :mod:`elastic.telemetry.reader` reads them back.

A file is rotated at 8 MiB. A process has at most eight: beyond that it
removes its oldest file except the first, which has the beginning of the run. Readers see the gap in
``seq``.
"""

from __future__ import annotations

import glob
import itertools
import json
import logging
import os
import queue
import re
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from elastic.errors import SYSTEM_CLOCK, Clock
from elastic.telemetry.events import Event, JournalClosed, JournalOpened, WorldEntered
from elastic.telemetry.log import LogOrigin, get_logger, shorten
from elastic.telemetry.runs import MAX_NODE_BYTES, is_default, journal_beside, remove_oldest_files
from elastic.tracebacks import for_a_line

SCHEMA = 1  # of the lines; incremented when a field changes its meaning or is removed
# Fields of every line in addition to the event's own.
ENVELOPE = ("event", "seq", "time", "monotonic", "writer", "node", "node_id")

THREAD = "elastic-journal"  # name of the threads that write
_FILES = 8  # of one process
_MAX_BYTES = 64 << 20  # of these files
_LONGEST_TEXT = 16_384  # characters of a value: a traceback of many ranks fits
_LONGEST_LINE = 262_144
_LONGEST_LOGGED = 2_000
_LONGEST_NAME = 80
# A disk that does not write a line within this hangs: nobody waits for it until it has caught up.
WRITE_PATIENCE_S = 1.0
_MAX_QUEUED = 10_000  # lines
_CAMEL = re.compile(r"(?<!^)(?=[A-Z])")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Position = Callable[[], Mapping[str, int | None]]
"""The position of a process when it writes a line: ``generation``, ``step``, ``rank``."""


class EventSink(Protocol):
    """Receives events. Never raises: telemetry must not stop training."""

    def emit(self, event: Event, *, level: int = logging.INFO) -> None: ...


def kebab_name(event: Event | type[Event]) -> str:
    """``WorldFormed`` → ``world-formed``."""
    kind = event if isinstance(event, type) else type(event)
    return _CAMEL.sub("-", kind.__name__).lower()


class Journal:
    """Writes events to the log and, if a folder is given, to a file. Thread-safe.

    ``origin``: the node named in log lines, in a process whose environment does not name it.
    ``role``: the kind of process, as recorded in the file: "agent" or "worker".
    ``is_bounded``: remove the oldest files of earlier processes of this node beyond a limit.
    """

    def __init__(
        self,
        *,
        folder: str | os.PathLike[str] | None,
        identity: Mapping[str, Any],
        clock: Clock = SYSTEM_CLOCK,
        origin: LogOrigin | None = None,
        role: str = "process",
        run_id: str | None = None,
        max_bytes: int = _MAX_BYTES,
        is_bounded: bool = False,
    ) -> None:
        self._identity = dict(identity)
        self._origin = origin
        self._clock = clock
        self._log = get_logger()
        self._position: Position = dict
        self._listeners: list[Callable[[Event], None]] = []
        self._role = role
        self._run_id = run_id
        self._name = secrets.token_hex(4)
        self._seq = itertools.count()  # of the writer's thread, too
        # Signal handlers and fork: a handler may interrupt a write of its own thread.
        self._lock = threading.RLock()
        self._is_bounded = is_bounded
        # In the state folder, which no user has chosen: it moves, and may be unwritable.
        self._is_default = bool(folder) and is_default(os.fspath(folder or ""))
        self._max_bytes = max_bytes
        self._pid = os.getpid()
        self._file = self._open(folder) if folder else None
        self._writer = _Writer() if self._file is not None or self._is_default else None
        if self._file is not None:
            self.record(self._opened())

    def _open(self, folder: str | os.PathLike[str]) -> _RotatingFile | None:
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", str(self._identity.get("node", "process")))
        path = Path(folder) / f"{name[:_LONGEST_NAME]}-{os.getpid()}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if self._is_bounded:
                earlier = path.parent.glob(f"{glob.escape(name[:_LONGEST_NAME])}-*.jsonl")
                remove_oldest_files(earlier, MAX_NODE_BYTES)
            return _RotatingFile(path, self._max_bytes // _FILES)
        except OSError as error:
            level = logging.DEBUG if self._is_default else logging.WARNING
            self._log.log(level, "no journal: %s cannot be written (%s)", path, error)
            return None

    @property
    def folder(self) -> str:
        """Where the file is; "" without one."""
        return str(self._file.path.parent) if self._file is not None else ""

    def move(self, checkpoints: str, on_moved: Callable[[str], object]) -> None:
        """Continue beside the checkpoints in this folder, if no user has chosen the journal's
        folder, and call ``on_moved`` with the new one. Otherwise it stays where it is."""
        writer = self._writer
        if writer is not None and self._is_default and self._run_id:
            writer.run(partial(self._move, checkpoints, on_moved))

    def _move(self, checkpoints: str, on_moved: Callable[[str], object]) -> None:
        """On the writer's thread."""
        if not self._is_default or not os.path.isdir(checkpoints):
            return
        assert self._run_id is not None
        old, new = self._file, self._open(journal_beside(checkpoints, self._run_id))
        if new is None:
            return
        try:
            if old is None:
                new.append(self._line(self._opened()))
            for part in old.paths() if old is not None else ():
                new.append(part.read_bytes())
        except OSError as error:  # such as a full disk: the old file has everything
            self._log.debug("journal: stays in %s: %s", self.folder, error)
            new.close()
            return
        self._file, self._is_default = new, False
        if old is not None:
            old.close()
            for part in old.paths():
                part.unlink(missing_ok=True)
        on_moved(self.folder)

    def _opened(self) -> JournalOpened:
        return JournalOpened(
            schema=SCHEMA,
            role=self._role,
            run_id=self._run_id,
            pid=os.getpid(),
            host=os.uname().nodename,
            boot_id=_boot_id(),
            library=_library_version(),
        )

    def locate(self, position: Position) -> None:
        """Add the position of the process to each line from now on: generation, step and rank."""
        self._position = position

    def listen(self, listener: Callable[[Event], None]) -> None:
        """Call ``listener`` with every event, on the emitting thread. It must not block."""
        self._listeners.append(listener)

    def emit(self, event: Event, *, level: int = logging.INFO) -> None:
        """Log and append one event, and call the listeners."""
        origin = self._origin
        if origin is not None and isinstance(event, WorldEntered):
            origin.generation = event.generation
        if self._log.isEnabledFor(level):
            shown = {k: _for_a_line(v) for k, v in _data(event).items() if v is not None}
            text = " ".join(f"{k}={v!r}" for k, v in shown.items())
            extra = {"origin": str(origin)} if origin is not None else None
            self._log.log(
                level, "%s %s", kebab_name(event), shorten(text, _LONGEST_LOGGED), extra=extra
            )
        self.record(event)
        for listener in self._listeners:
            self._notify(listener, event)

    def _notify(self, listener: Callable[[Event], None], event: Event) -> None:
        try:
            listener(event)
        except Exception as error:  # noqa: BLE001 - telemetry must not stop training
            self._log.warning("journal: a listener failed on %s: %r", kebab_name(event), error)

    def record(self, event: Event) -> None:
        """Append one event without logging it."""
        if self._writer is None or self._pid != os.getpid():
            return  # in a forked child the file is its parent's
        with self._lock:
            self._writer.run(partial(self._append, self._line(event)))

    def _append(self, line: bytes) -> None:
        """On the writer's thread."""
        file = self._file
        if file is None:
            return
        try:
            if file.is_full:
                file.rotate()
                file.append(self._line(self._opened()))
            file.append(line)
        except OSError as error:
            if file.is_unreported(error):
                self._log.warning(
                    "journal: %s: %s; events are lost until writing succeeds", file.path, error
                )

    def _line(self, event: Event) -> bytes:
        envelope = {
            "event": kebab_name(event),
            "seq": next(self._seq),
            "time": self._clock.wall(),
            "monotonic": self._clock.monotonic(),
            "writer": self._name,
            **self._identity,
            **{k: v for k, v in self._where().items() if v is not None},
        }
        # An event's own `node` may differ from the writer's: it becomes `of_node`.
        data = {f"of_{k}" if k in ENVELOPE else k: v for k, v in _data(event).items()}
        line = _encode({**envelope, **data})
        if len(line) > _LONGEST_LINE:
            cut = {k: shorten(_encode(v).decode(), 512) for k, v in data.items()}
            line = _encode({**envelope, **cut})
        return line + b"\n"

    def _where(self) -> Mapping[str, int | None]:
        try:
            return self._position()
        except Exception as error:  # noqa: BLE001 - the event is written without its place
            self._log.debug("journal: no position: %r", error)
            return {}

    def close(self) -> None:
        """Close the file. Later events only reach the log."""
        if self._writer is None or self._pid != os.getpid():
            return
        self.record(JournalClosed())
        with self._lock:
            writer, self._writer = self._writer, None
        writer.run(self._close)
        writer.close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


class _Writer:
    """A thread that touches the file. A file system may hang, and telemetry must not stop training,
    nor an agent's thread that the others wait for: a caller waits until its line is written, but
    not while the disk hangs."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], object], threading.Event]]
        self._queue = queue.SimpleQueue()
        self._hangs = False
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], object]) -> None:
        """Have the thread do ``work``, and wait for it unless the disk hangs."""
        if self._queue.qsize() >= _MAX_QUEUED:
            return
        done = threading.Event()
        self._queue.put((work, done))
        if not self._hangs:
            self._hangs = not done.wait(WRITE_PATIENCE_S)

    def close(self) -> None:
        """End the thread after what it has been given, and wait for that unless the disk hangs."""
        self._queue.put((_END, threading.Event()))
        if not self._hangs:
            self._thread.join(10 * WRITE_PATIENCE_S)  # no line is left: slow only if the cores are

    def _run(self) -> None:
        while (item := self._queue.get())[0] is not _END:
            work, done = item
            work()
            done.set()
            if self._queue.empty():
                self._hangs = False


def _END() -> None:
    """Ends a writer's thread."""


class _RotatingFile:
    """``name.jsonl`` is the newest part; older ones are ``name.N.jsonl``, N from 1."""

    def __init__(self, path: Path, part_bytes: int) -> None:
        self.path = path
        self._part_bytes = max(part_bytes, 4096)
        self._reported: set[int | None] = set()
        self._is_torn = False
        self.is_closed = False
        self._fd, self._size = self._begin()

    def _begin(self) -> tuple[int, int]:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        fd = os.open(self.path, flags, 0o644)
        size = os.fstat(fd).st_size
        # A process of the same name and id may have been killed in the middle of a line.
        self._is_torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        return fd, size

    @property
    def is_full(self) -> bool:
        return self._size >= self._part_bytes

    def rotate(self) -> None:
        """Continue in a new file; remove the oldest except the first if there are too many."""
        parts = sorted(self._parts())
        self.path.rename(self._part(parts[-1] + 1 if parts else 1))
        for number in parts[1 : max(1, len(parts) + 3 - _FILES)]:
            self._part(number).unlink(missing_ok=True)
        os.close(self._fd)
        self._fd, self._size = self._begin()

    def _part(self, number: int) -> Path:
        return self.path.with_suffix(f".{number}.jsonl")

    def paths(self) -> list[Path]:
        """All parts, oldest first."""
        return [*map(self._part, sorted(self._parts())), self.path]

    def _parts(self) -> list[int]:
        rest = re.compile(re.escape(self.path.stem) + r"\.(\d+)\.jsonl")
        matches = map(rest.fullmatch, os.listdir(self.path.parent))
        return [int(match[1]) for match in matches if match]

    def append(self, line: bytes) -> None:
        """Append with one write, after a line break if the previous line was truncated."""
        data = b"\n" + line if self._is_torn else line
        written = os.write(self._fd, data)
        self._size += written
        self._is_torn = written < len(data)
        if not self._is_torn:
            self._reported.clear()

    def is_unreported(self, error: OSError) -> bool:
        """Whether this kind of failure has not been reported since the last success."""
        is_new = error.errno not in self._reported
        self._reported.add(error.errno)
        return is_new

    def close(self) -> None:
        self.is_closed = True
        os.close(self._fd)


def _data(event: Event) -> dict[str, Any]:
    return {field.name: _plain(getattr(event, field.name)) for field in fields(event)}


def _for_a_line(value: Any) -> Any:
    """A traceback as its exception and place: the process that it ended has printed its lines."""
    return for_a_line(value) if isinstance(value, str) else value


def _plain(value: Any) -> Any:
    return shorten(value, _LONGEST_TEXT) if isinstance(value, str) else value


def _encode(value: Any) -> bytes:
    try:
        return json.dumps(value, allow_nan=False).encode()
    except (TypeError, ValueError):  # not representable in JSON
        return json.dumps(json.loads(json.dumps(value, default=repr), parse_constant=str)).encode()


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _library_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch-elastic-harness")
    except PackageNotFoundError:
        return ""
