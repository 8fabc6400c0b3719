"""Heartbeats of an agent's threads: each records the time of its last iteration."""

from __future__ import annotations

import threading

from elastic.clock import SYSTEM_CLOCK, Clock


class Watchdog:
    """Times by thread. Takes no lock: a hung thread must not block the one that checks it."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._stamps: dict[str, float] = {}

    def heartbeat(self) -> None:
        """The calling thread is alive. After its first heartbeat it is expected to continue."""
        self._stamps[threading.current_thread().name] = self._clock.monotonic()

    def rest(self) -> None:
        """The calling thread ends normally: it is no longer checked."""
        self._stamps.pop(threading.current_thread().name, None)

    def silences_s(self) -> dict[str, float]:
        """How long each thread has made no progress, by its name."""
        now = self._clock.monotonic()
        return {thread: now - stamp for thread, stamp in self._stamps.copy().items()}
