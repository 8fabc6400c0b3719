"""Signs of life of an agent's own threads: each stamps the time whenever it turns."""

from __future__ import annotations

import threading

from elastic.clock import SYSTEM_CLOCK, Clock


class Watchdog:
    """Stamps by thread. Takes no lock: a hung thread must not hang the one that looks for it."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._stamps: dict[str, float] = {}

    def heartbeat(self) -> None:
        """The calling thread is alive. After its first heartbeat it is expected to continue."""
        self._stamps[threading.current_thread().name] = self._clock.monotonic()

    def rest(self) -> None:
        """The calling thread ends in order: nothing more is expected of it."""
        self._stamps.pop(threading.current_thread().name, None)

    def silences_s(self) -> dict[str, float]:
        """For how long each thread has not turned, by its name."""
        now = self._clock.monotonic()
        return {thread: now - stamp for thread, stamp in self._stamps.copy().items()}
