"""Detects which files are read by any process, with inotify's system calls.

Sampling the open files of processes misses fast readers; most mounts do not record access times.
The kernel reports every read on this machine, network file systems included.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable
from pathlib import Path

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
