"""Detects scripts that start from scratch after a restart although they had saved a checkpoint.

For scripts that do not use this project: after a restart they must load their own checkpoint, and
many do so only with a flag (nanoGPT: ``init_from='resume'``). When the workers are restarted, the
checkpoint files that were written since this agent began are searched by name, below the working
directory and the folders on the command line. If one is written again before any of them was read,
training has started over.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic.clock import SYSTEM_CLOCK, Clock
from elastic.rendezvous.scripts.file_reads import FileReads
from elastic.telemetry.log import get_logger
from elastic.tuning.agent_intervals import FILE_READS_S, FILE_TIMES_S

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
    found = {folder.resolve()}
    for text in arguments:
        path = folder / text.rpartition("=")[2]
        near = next((p for p in (path, path.parent) if os.path.isdir(p)), None)
        if near is not None:
            found.add(near.resolve())
    found = {path for path in found if path != Path(path.anchor)}
    return tuple(p for p in found if not any(q in p.parents for q in found))


def written_since(roots: Sequence[Path], since_s: float) -> list[Written]:
    """Checkpoint files below ``roots`` that were written at ``since_s`` or later, newest first."""
    entries = itertools.islice((e for root in roots for e in _below(root, _DEPTH)), _MAX_ENTRIES)
    found = []
    for entry in entries:
        if os.path.splitext(entry.name)[1] not in SUFFIXES:
            continue
        try:
            status = entry.stat()
        except OSError:  # it has been replaced
            continue
        if status.st_mtime >= since_s - FILE_TIMES_S:
            cut_off = status.st_size < _MIN_BYTES
            found.append(Written(Path(entry.path), status.st_mtime, cut_off))
    found.sort(key=lambda written: -written.time_s)
    return found


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
