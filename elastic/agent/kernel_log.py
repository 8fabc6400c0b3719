"""The kernel's log since the start of this node's workers: Xid, OOM kills, broken disks.

A GPU or disk error that ends a worker is often missing from the worker's output. Reading the log
requires CAP_SYSLOG or ``kernel.dmesg_restrict=0`` and, in a container, ``/dev/kmsg``. Without them,
:attr:`KernelLogExcerpt.problem` states why there is no such evidence.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from elastic.errors import SYSTEM_CLOCK, Clock
from elastic.hangs.kernel import is_relevant
from elastic.membership.failures import RULES

# To read the kernel's log since the start of the workers, while the node's thread waits.
KERNEL_LOG_READ_S = 0.2

KMSG = Path("/dev/kmsg")
_RECORD_BYTES = 8192  # the longest record (CONSOLE_EXT_LOG_MAX, kernel/printk/internal.h)
_MAX_LINES_READ = 20_000  # at a time; older ones are dropped
_MAX_LINES, _MAX_CHARACTERS = 5, 300  # of each kind; of a line
_FIRST_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO, include/linux/proc_ns.h


@dataclass(frozen=True)
class KernelLogExcerpt:
    """The last lines that may explain the end of a worker. ``problem`` is why none can be read."""

    lines: tuple[str, ...] = ()
    problem: str = ""

    def __str__(self) -> str:
        return "; ".join(self.lines) or self.problem

    def has_killed(self, pid: int) -> bool:
        """Whether the OOM killer has ended this process. False in a container, where the log has
        the machine's process ids."""
        if os.stat("/proc/self/ns/pid").st_ino != _FIRST_PID_NAMESPACE:
            return False
        return any(f"killed process {pid} " in line.lower() for line in self.lines)


class KernelLog:
    """The kernel's log, read after the end of a worker. Safe for use by any thread; its owner
    calls ``close``.

    :meth:`mark` skips to the end of the log when workers start, so that later lines are about them
    and months of log need not be read.
    """

    def __init__(self, path: Path = KMSG, clock: Clock = SYSTEM_CLOCK) -> None:
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._fd = -1
        self._problem = ""
        self._rest = b""  # the incomplete last line of a read
        # Lines that match a rule must not be displaced by many lines that may be relevant.
        self._known: deque[str] = deque(maxlen=_MAX_LINES)
        self._other: deque[str] = deque(maxlen=_MAX_LINES)

    def mark(self) -> None:
        """Skip the lines so far: workers are about to start."""
        with self._lock:
            self._known.clear()
            self._other.clear()
            self._rest = b""
            try:
                if self._fd < 0:
                    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
                    self._fd = os.open(self._path, flags)
                os.lseek(self._fd, 0, os.SEEK_END)
            except OSError as error:
                self._fail(error)
            else:
                self._problem = ""

    def excerpt(self) -> KernelLogExcerpt:
        """The lines since the last :meth:`mark`. Does not block; reads for a limited time."""
        with self._lock:
            for line in self._read():
                self._note(line.decode(errors="replace"))
            return KernelLogExcerpt((*self._other, *self._known), self._problem)

    def close(self) -> None:
        """Close the log. Idempotent."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1

    def _read(self) -> Iterable[bytes]:
        """The newest lines since the last call. A read of /dev/kmsg returns one record; a read of
        a file, many."""
        lines: deque[bytes] = deque(maxlen=_MAX_LINES_READ)
        until_s = self._clock.monotonic() + KERNEL_LOG_READ_S
        while self._fd >= 0 and self._clock.monotonic() < until_s:
            try:
                read = os.read(self._fd, _RECORD_BYTES)
            except BlockingIOError:
                break  # that was the last one
            except BrokenPipeError:
                continue  # records were overwritten: the next read returns the oldest existing one
            except OSError as error:
                self._fail(error)
                break
            if not read:
                break
            *complete, self._rest = (self._rest + read).split(b"\n")
            lines.extend(complete)
        return lines

    def _note(self, line: str) -> None:
        """Keep a relevant ``level,number,microseconds,flags;text``; continuation lines, which begin
        with a space, are ignored."""
        prefix, separator, text = line.partition(";")
        if not separator or prefix.startswith(" "):
            return
        if not is_relevant(text):
            return
        is_known = any(rule.kernel_pattern.search(text) for rule in RULES)
        (self._known if is_known else self._other).append(text[:_MAX_CHARACTERS])

    def _fail(self, error: OSError) -> None:
        self._problem = (
            f"the kernel log cannot be read ({self._path}: {error.strerror}): Xid errors and OOM "
            "kills of this node are not detected"
        )
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1
