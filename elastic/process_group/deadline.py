"""Deadlines of calls that cannot be interrupted, and how a process ends that is stuck in one.

A call into NCCL that hangs cannot be interrupted: no exception reaches it, and the thread that is
in there does not come back. The process ends, and its agent starts another one, as after any death.
"""

from __future__ import annotations

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
_TICK_S = DEADLINE_TICK_S


class CallDeadline:
    """Calls ``expire`` once, in its own thread, unless :meth:`met` is called in time.

    It counts ticks, not the clock: a process that was stopped (SIGSTOP, a frozen container) has
    had no time to end its call, and gets the rest of it when it continues.
    """

    def __init__(self, timeout_s: float, expire: Callable[[], object], *, name: str) -> None:
        self._ticks = max(1, round(timeout_s / _TICK_S))
        self._expire = expire
        self._met = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def met(self) -> None:
        """The call has returned. From any thread."""
        self._met.set()

    def end(self) -> None:
        """As :meth:`met`, and the thread has ended."""
        self._met.set()
        self._thread.join()

    def _run(self) -> None:
        for _ in range(self._ticks):
            if SYSTEM_CLOCK.wait(self._met, _TICK_S):
                return
        self._expire()


def end_process(reason: str, journal: EventSink | None = None) -> NoReturn:
    """End this process now, with the reason on stderr, in the journal and in torch's error file."""
    try:
        os.write(2, f"elastic: {reason}; this worker ends, and its agent starts it anew\n".encode())
        if journal is not None:
            journal.emit(WorkerStuck(reason=reason))
        record(ElasticError(reason))
    finally:
        os._exit(STUCK_EXIT_CODE)
