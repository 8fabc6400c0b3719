"""Deadlines for calls that cannot be interrupted, and the end of a process that is stuck in one.

A call into NCCL that hangs cannot be interrupted: no exception reaches it, and its thread never
returns. The process ends, and its agent starts another one, as after any crash.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import threading
from collections.abc import Callable
from typing import NoReturn

from elastic.clock import SYSTEM_CLOCK
from elastic.errors import ElasticError
from elastic.events import WorkerStuck
from elastic.telemetry.journal import EventSink
from elastic.tuning.worker_intervals import DEADLINE_TICK_S
from elastic.world.failure import record

STUCK_EXIT_CODE = 1
_STDERR = 2


class CallDeadline:
    """Calls ``expire`` once, in its own thread, unless :meth:`met` is called in time.

    It counts ticks, not wall-clock time: a process that was stopped (SIGSTOP, a frozen container)
    could not complete its call, and still has the remaining time when it continues.
    """

    def __init__(self, timeout_s: float, expire: Callable[[], object], *, name: str) -> None:
        self._ticks = max(1, round(timeout_s / DEADLINE_TICK_S))
        self._expire = expire
        self._met = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def met(self) -> None:
        """Report that the call has returned. Thread-safe."""
        self._met.set()

    def end(self) -> None:
        """Like :meth:`met`, but wait until the thread has ended."""
        self._met.set()
        self._thread.join()

    def _run(self) -> None:
        for _ in range(self._ticks):
            if SYSTEM_CLOCK.wait(self._met, DEADLINE_TICK_S):
                return
        self._expire()


class LastResort:
    """Ends the process from a C thread if :meth:`met` is not called in time.

    A thread that waits in C++ and holds the interpreter lock blocks all Python code, including
    every :class:`CallDeadline`. faulthandler's timer needs no Python: it writes the stacks of all
    threads to stderr, and ends the process with code 1. There is one timer per process: this one
    replaces any that the script has set with ``faulthandler.dump_traceback_later``.
    """

    def __init__(self, timeout_s: float) -> None:
        faulthandler.dump_traceback_later(timeout_s, exit=True, file=_STDERR)

    def met(self) -> None:
        """Cancel the timer. Thread-safe."""
        faulthandler.cancel_dump_traceback_later()


def end_process(reason: str, journal: EventSink | None = None) -> NoReturn:
    """End this process now, with the reason on stderr, in the journal and in torch's error file."""
    try:
        os.write(
            _STDERR, f"elastic: {reason}; this worker ends, and its agent restarts it\n".encode()
        )
        if journal is not None:
            journal.emit(WorkerStuck(reason=reason))
        record(ElasticError(reason))
    finally:
        os._exit(STUCK_EXIT_CODE)


def leak(group: object) -> None:
    """Never run the group's destructor, not even at exit: it would join a stuck thread.

    This leaks two threads and a few descriptors, until the group's timeout ends them.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
