"""Stops the main thread, so that another thread can save an unchanging state.

For a process that is about to end: a thread that stops here does not continue. A step boundary is
the best place. If none is reached in time, a signal interrupts the script in the middle of a step,
provided that no optimizer has stepped in it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import NoReturn

from elastic.clock import SYSTEM_CLOCK
from elastic.tuning.worker_intervals import HALT_SLICE_S


class Place(Enum):
    """Where the main thread was stopped."""

    BOUNDARY = "between two steps: the state is that of the last commit"
    STEP = "in a step: its changes must be rolled back"
    FAILED = "an exception ended the script: changes must be rolled back, as in a step"


class Halt:
    """Requests and checks for a stop. One per process: the saving thread requests, the main thread
    checks."""

    def __init__(self) -> None:
        self.place: Place | None = None
        self.is_preempted = False  # this process was asked to leave, and does so at a boundary
        self.has_left = False  # this process has saved and is about to exit
        self._is_requested = threading.Event()
        self._may_interrupt: Callable[[], bool] | None = None
        self._unanswered_since_s: float | None = None  # an interrupt that no handler has seen
        self._saving = threading.Lock()

    # -- the thread that saves ----------------------------------------------------------------

    def request(self) -> None:
        """Request a stop at the next boundary, or when an exception ends the script."""
        self._is_requested.set()

    def wait_for_own_save(self, timeout_s: float) -> bool:
        """Wait until the main thread is not saving; False if it still is."""
        if not self._saving.acquire(timeout=max(0.0, timeout_s)):
            return False
        self._saving.release()
        return True

    def interrupt(self, may_stop: Callable[[], bool]) -> None:
        """Make the main thread check, at its next Python instruction, whether it may stop."""
        self._may_interrupt = may_stop
        if self._unanswered_since_s is None:
            self._unanswered_since_s = SYSTEM_CLOCK.monotonic()
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGTERM)

    @property
    def unanswered_s(self) -> float:
        """How long the main thread has not executed the handler of an interrupt."""
        since_s = self._unanswered_since_s
        return 0.0 if since_s is None else SYSTEM_CLOCK.monotonic() - since_s

    def freeze(self) -> None:
        """Count the main thread as stopped: an interrupt is pending, which it handles before it
        executes any more Python."""
        self._may_interrupt = lambda: True
        self.place = Place.STEP

    # -- the main thread ----------------------------------------------------------------------

    def at_boundary(self) -> None:
        """Stop here if requested. Does not return in that case."""
        if self._is_requested.is_set():
            self._stop(Place.BOUNDARY)

    def on_signal(self) -> bool:
        """Whether :meth:`interrupt` sent this SIGTERM. Does not return if the thread stops here."""
        may_stop = self._may_interrupt
        if may_stop is None or self._unanswered_since_s is None:
            return False
        self._unanswered_since_s = None
        if may_stop():
            self._stop(Place.STEP)
        return True

    @contextmanager
    def own_save(self) -> Iterator[None]:
        """Let the main thread save, unless another thread is about to save."""
        with self._saving:
            is_requested = self._is_requested.is_set()
            if not is_requested:
                yield
        if is_requested:
            self._stop(Place.FAILED)

    def _stop(self, place: Place) -> NoReturn:
        self.place = place
        while True:  # the other thread ends the process
            SYSTEM_CLOCK.sleep(HALT_SLICE_S)
