"""SIGTERM to a worker: its node is told to leave, or torchrun ends the siblings of a dead one.

Only the agent knows which. In the first case the worker goes on to the next step's boundary,
where it leaves in order; in the second it ends now.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from elastic.worker.worlds import Worlds

ANSWER_S = 1.0
EXIT_CODE = 128 + signal.SIGTERM


def ask_agent_on_sigterm(worlds: Worlds) -> None:
    """Take SIGTERM over, unless the script has done that, or this is not the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _Handler(worlds))


class _Handler:
    def __init__(self, worlds: Worlds) -> None:
        self._worlds = worlds
        self._pid = os.getpid()

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked data worker has inherited the handler
            os._exit(EXIT_CODE)
        # Not here: the interrupted main thread may hold the link's lock.
        threading.Thread(target=self._ask, name="elastic-sigterm", daemon=True).start()

    def _ask(self) -> None:
        if self._worlds.has_left or not self._worlds.is_node_leaving(ANSWER_S):
            os._exit(EXIT_CODE)
