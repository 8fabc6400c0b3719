"""Calls that may block, beside the link's thread, which must receive worlds in the meantime."""

from __future__ import annotations

import threading
from collections.abc import Callable

from elastic.tuning.worker_intervals import LINK_CLOSE_S


class SingleCall:
    """At most one call at a time, on a thread of its own. Its owner calls ``close``."""

    def __init__(self, thread_name: str) -> None:
        self._name = thread_name
        self._thread: threading.Thread | None = None

    def start(self, call: Callable[..., object], *arguments: object) -> None:
        """Start a call, unless the previous one has not returned. On the link's thread only."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = threading.Thread(target=call, args=arguments, name=self._name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for a pending call, but only for LINK_CLOSE_S: it may be blocked."""
        if self._thread is not None:
            self._thread.join(LINK_CLOSE_S)
