"""Scripts that do not call ``elastic.join``: what a restart costs them."""

from __future__ import annotations

import ctypes
import itertools
import logging
import math
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic.errors import SYSTEM_CLOCK, Clock
from elastic.telemetry.log import get_logger

# From the start of the workers to elastic.join(): frameworks import for 15 to 30 s, and longer on a
# busy machine or from a cold cache. Only a job that lasts longer can lose much by a restart.
JOIN_EXPECTED_S = 120.0
# File systems take their times from a clock with a resolution of a few milliseconds.
FILE_TIMES_S = 0.1
# How often the files read by a restarted script are checked.
FILE_READS_S = 1.0

# ----------------------------------------------------------------------------
# Detects which files are read by any process, with inotify's system calls.
#
# Sampling the open files of processes misses fast readers; most mounts do not record access times.
# The kernel reports every read on this machine, network file systems included.

# <sys/inotify.h>
_ACCESS, _MODIFY, _CLOSE_NOWRITE, _OPEN = 0x1, 0x2, 0x10, 0x20
_EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name
_BUFFER_BYTES = 1 << 16


class FileReads:
    """Watches ``paths`` from now on. Raises OSError if the kernel cannot."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._check(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC), None)
        self._open: dict[int, Path] = {}  # not written since
        self._read: set[Path] = set()
        self._maybe: set[Path] = set()  # opened: for reading, unless a write follows
        try:
            for path in paths:
                mask = _ACCESS | _MODIFY | _CLOSE_NOWRITE | _OPEN
                name = os.fsencode(path)
                watch = self._libc.inotify_add_watch(self._fd, name, ctypes.c_uint32(mask))
                self._open[self._check(watch, path)] = path
        except OSError:
            self.close()
            raise

    def _check(self, result: int, path: Path | None) -> int:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), None if path is None else str(path))
        return result

    def seen(self) -> set[Path]:
        """Files that were opened and not written, in the events observed so far."""
        while True:
            try:
                data = os.read(self._fd, _BUFFER_BYTES)
            except BlockingIOError:
                return self._read | self._maybe
            at = 0
            while at < len(data):
                watch, mask, _, length = _EVENT.unpack_from(data, at)
                at += _EVENT.size + length
                self._on_event(watch, mask)

    def _on_event(self, watch: int, mask: int) -> None:
        path = self._open.get(watch)
        if path is None:  # written since, or the queue has overflown
            return
        if mask & _MODIFY:
            self._maybe.discard(path)
            del self._open[watch]
        elif mask & (_ACCESS | _CLOSE_NOWRITE):
            self._read.add(path)
        elif mask & _OPEN:  # the only event of a mapped file
            self._maybe.add(path)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


# ----------------------------------------------------------------------------
# Logs a job's guarantees once, at its start, if they are weaker than in-process recovery.
#
# A script's recovery mode depends on its calls, and is otherwise not visible: a script that does
# not use this project trains under this launcher as under any other, until the world changes.

RESTART_MODE = (
    "mode=restart: when the world changes, all workers are restarted. A script with "
    "elastic.join() resumes from its last checkpoint, with the same global batch and order of "
    "data; any other script must load its own checkpoint. Without elastic.ElasticSampler its "
    "global batch is the batch per rank times the number of ranks, which changes with the world"
)
UNMODIFIED = (
    "no worker has called elastic.join() within {after_s:g} s of its start. If none does: when the "
    "world changes, all workers are restarted. The script must load its own newest checkpoint, or "
    "it starts from scratch; later steps are repeated. Its global batch is the batch per rank "
    "times the number of ranks, which changes with the world, unless elastic.ElasticSampler or "
    "elastic.join() with run.loader keeps it the same"
)


_TORCHS_LOGGER = "torch.distributed.elastic.multiprocessing.api"
# torch 2.11 to 2.15, PContext._close: one warning for each worker in each recovery by a restart.
_ENDED_WORKER = "Sending process %s closing signal %s"
# PContext.start, for each name in an empty list of signals: this package handles all of them.
_NO_SIGNAL = ("Failed to register signal handler for %s", ("",))


def drop_signal_warnings() -> None:
    """Drop torch's warnings for each ended worker, whose reason the leader logs, and for signals
    that it does not handle. Idempotent."""
    logger = logging.getLogger(_TORCHS_LOGGER)
    if _is_worth_reading not in logger.filters:
        logger.addFilter(_is_worth_reading)


def _is_worth_reading(record: logging.LogRecord) -> bool:
    return record.msg != _ENDED_WORKER and (record.msg, record.args) != _NO_SIGNAL


class RestartNotice:
    """One per agent. ``say`` logs the message."""

    def __init__(
        self,
        mode: str,
        *,
        clock: Clock = SYSTEM_CLOCK,
        say: Callable[[str], object] | None = None,
    ) -> None:
        self._mode = mode
        self._clock = clock
        self._say = say or get_logger().warning
        self._due_s: float | None = None
        self._is_reported = False

    def workers_start(self, *, is_first_node: bool) -> None:
        """Called when workers start; ``is_first_node``: one of them is rank 0."""
        if self._is_reported or not is_first_node:
            self._due_s = None
        elif self._mode == "restart":
            self._log(RESTART_MODE)
        elif self._due_s is None:
            self._due_s = self._clock.monotonic() + JOIN_EXPECTED_S

    def look(self, *, have_joined: bool) -> None:
        """Called periodically while they run. ``have_joined``: one has called elastic.join()."""
        if have_joined:
            self._due_s = None
        elif self._due_s is not None and self._clock.monotonic() >= self._due_s:
            self._log(UNMODIFIED.format(after_s=JOIN_EXPECTED_S))

    def _log(self, sentence: str) -> None:
        self._is_reported, self._due_s = True, None
        self._say(sentence)


# ----------------------------------------------------------------------------
# Detects scripts that start from scratch after a restart although they had saved a checkpoint.
#
# For scripts that do not use this project: after a restart they must load their own checkpoint,
# and many do so only with a flag (nanoGPT: ``init_from='resume'``). When the workers are
# restarted, the checkpoint files that were written since this agent began are searched by name,
# below the working directory and the folders on the command line. If one is written again before
# any of them was read, training has started over.

SUFFIXES = frozenset({".pt", ".pth", ".ckpt", ".tar", ".safetensors", ".distcp", ".bin", ".npz"})
_MIN_BYTES = 64
_DEPTH = 4  # out/run-1/checkpoint-500/model.safetensors
_MAX_ENTRIES = 20_000
_MAX_FILES = 64
_SHARE = 0.02  # of a core, for the search
_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages", "proc", "sys", "dev"})


@dataclass(frozen=True)
class Written:
    """A checkpoint file, and when it was last written."""

    path: Path
    time_s: float
    cut_off: bool = False  # opened, but not written: its worker was killed, or is about to write


def places(arguments: Sequence[str], folder: Path) -> tuple[Path, ...]:
    """Folders where a script with these arguments may save: the working directory, and those named
    by arguments.

    >>> sorted(map(str, places(["train.py", "--out=/tmp/new-folder"], Path("/"))))
    ['/tmp']
    """
    folders = {folder.resolve()}
    for text in arguments:
        path = folder / text.rpartition("=")[2]
        near = next((p for p in (path, path.parent) if os.path.isdir(p)), None)
        if near is not None:
            folders.add(near.resolve())
    folders = {path for path in folders if path != Path(path.anchor)}
    return tuple(p for p in folders if not any(q in p.parents for q in folders))


def written_since(roots: Sequence[Path], since_s: float) -> list[Written]:
    """Checkpoint files below ``roots`` that were written at ``since_s`` or later, newest first."""
    entries = itertools.islice((e for root in roots for e in _below(root, _DEPTH)), _MAX_ENTRIES)
    files = []
    for entry in entries:
        if os.path.splitext(entry.name)[1] not in SUFFIXES:
            continue
        try:
            status = entry.stat()
        except OSError:  # it has been replaced
            continue
        if status.st_mtime >= since_s - FILE_TIMES_S:
            cut_off = status.st_size < _MIN_BYTES
            files.append(Written(Path(entry.path), status.st_mtime, cut_off))
    files.sort(key=lambda written: -written.time_s)
    return files


def _below(folder: Path | str, depth: int) -> Iterator[os.DirEntry[str]]:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        if not entry.is_dir(follow_symlinks=False):
            yield entry
        elif depth > 0 and entry.name not in _SKIPPED and not entry.name.startswith("."):
            yield from _below(entry.path, depth - 1)


class StartingOver:
    """One per agent. ``is_looked_for``: whether the script does not use this package."""

    def __init__(
        self,
        roots: Callable[[], Sequence[Path]],
        is_looked_for: Callable[[], bool],
        *,
        clock: Clock = SYSTEM_CLOCK,
        warn: Callable[[str], object] | None = None,
    ) -> None:
        self._roots = roots
        self._is_looked_for = is_looked_for
        self._clock = clock
        self._warn = warn or get_logger().warning
        self._began_s = clock.wall()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_warned = False

    def workers_start_again(self) -> None:
        """Called before the workers are restarted; returns at once."""
        self.close()
        if self._has_warned:
            return
        self._stop = threading.Event()
        # Workers take seconds to import torch: the search ends before that.
        self._thread = threading.Thread(
            target=self._run, args=(self._stop,), name="elastic-starting-over", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop the search, and join. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, stop: threading.Event) -> None:
        again_s, roots = self._clock.wall(), self._roots()
        before = _to_watch(written_since(roots, self._began_s))
        if not before:
            return
        try:
            reads = FileReads(written.path for written in before)
        except OSError as error:  # a file was just replaced, or no inotify watches are left
            get_logger().debug("reads of checkpoints cannot be watched: %s", error)
            return
        try:
            self._watch(reads, before, roots, again_s, stop)
        finally:
            reads.close()

    def _watch(
        self,
        reads: FileReads,
        before: list[Written],
        roots: Sequence[Path],
        again_s: float,
        stop: threading.Event,
    ) -> None:
        known = {written.path: written.time_s for written in before}
        # A file that was cut off may be no checkpoint: writing another one is not starting over.
        since_s = math.inf if before[0].cut_off else 0.0
        pause_s = FILE_READS_S
        while not self._clock.wait(stop, pause_s):
            if reads.seen():
                return
            began_s = self._clock.monotonic()
            written = [
                w
                for w in written_since(roots, again_s)
                if not w.cut_off and w.time_s > known.get(w.path, since_s)
            ]
            pause_s = max(FILE_READS_S, (self._clock.monotonic() - began_s) / _SHARE)
            if not written or reads.seen():
                continue
            if self._is_looked_for():
                self._has_warned = True
                self._warn(_sentence(written[-1].path, before[0].path))
            return


def _to_watch(written: list[Written]) -> list[Written]:
    """The checkpoints that a restarted script may resume from. If there are none, those that were
    cut off: a script that always overwrites the same file has no other.
    """
    complete = [w for w in written if not w.cut_off]
    return (complete or written)[:_MAX_FILES]


def _sentence(again: Path, before: Path) -> str:
    what = f"{again} again without having read it"
    if again != before:
        what = f"{again} without having read {before}, which it had saved before the restart"
    return (
        f"training has started over: the restarted script has written {what}. Make it resume from "
        "its newest checkpoint whenever there is one (nanoGPT: init_from='resume'; Hugging Face: "
        "resume_from_checkpoint=True), or use elastic.join(), which does that automatically"
    )
