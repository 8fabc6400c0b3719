"""SIGTERM to a worker: its node is told to leave, or torchrun ends the siblings of a dead one.

Only the agent knows which. In the first case the worker goes on to the next step's boundary,
where it leaves in order; in the second it ends now.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from elastic.clock import SYSTEM_CLOCK
from elastic.worker.worlds import Worlds

# A scheduler may signal the worker before the agent knows: ask again for so long.
ASK_FOR_S = 0.3
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
        until_s = SYSTEM_CLOCK.monotonic() + ASK_FOR_S
        while not self._worlds.has_left and SYSTEM_CLOCK.monotonic() < until_s:
            if self._worlds.is_node_leaving(ASK_FOR_S):
                return
            SYSTEM_CLOCK.sleep(ASK_FOR_S / 6)
        os._exit(EXIT_CODE)
