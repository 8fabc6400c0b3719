"""Handles the signals that end a worker: its node drains, its job is over, or torchrun only ends
the siblings of a dead worker.

Only the agent knows which. On a draining node, workers continue to the next step boundary. In the
other cases they end, and may save first: whether another rank has their state depends on which
other workers end.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from elastic.errors import SYSTEM_CLOCK
from elastic.groups.world import is_launched
from elastic.telemetry.log import get_logger
from elastic.worker.worlds import Worlds

# A scheduler may signal the worker before the agent: the worker asks its agent again for this long.
SIGTERM_ASK_S = 0.3

EXIT_CODE = 128 + signal.SIGTERM
# The agent creates this file when it ends its workers permanently: it works without a link, too.
ENDING_FILE = "ELASTIC_ENDING"


def ends_for_good() -> bool:
    """Whether the agent has announced that these workers will not be started again."""
    path = os.environ.get(ENDING_FILE)
    return bool(path) and os.path.exists(str(path))


def _save_nothing(is_for_good: bool) -> None:
    """The default shutdown hook."""


def _never() -> bool:
    return False


def ask_agent_on_sigterm(
    worlds: Worlds,
    shutdown_hook: Callable[[bool], object] = _save_nothing,
    is_own_signal: Callable[[], bool] = _never,
) -> None:
    """Handle SIGTERM, unless the script has a handler, or this is not the main thread.

    Like :func:`end_on_sigterm`, but the worker stays if the agent reports that its node drains.
    """

    def is_node_leaving() -> bool:
        until_s = SYSTEM_CLOCK.monotonic() + SIGTERM_ASK_S
        while not worlds.has_left and SYSTEM_CLOCK.monotonic() < until_s:
            if worlds.is_node_leaving(SIGTERM_ASK_S):
                return True
            SYSTEM_CLOCK.sleep(SIGTERM_ASK_S / 6)
        return False

    end_on_sigterm(shutdown_hook, ends_for_good, is_own_signal, unless=is_node_leaving)


def end_on_sigterm(
    shutdown_hook: Callable[[bool], object],
    is_for_good: Callable[[], bool],
    is_own_signal: Callable[[], bool] = _never,
    *,
    unless: Callable[[], bool] = lambda: False,
) -> None:
    """End at a signal, after ``shutdown_hook``, unless ``unless()`` is true.

    ``shutdown_hook`` runs on a separate thread; its argument is true if this process will not be
    started again. ``is_own_signal`` runs on the interrupted main thread; if it returns true, the
    process sent the signal itself, which is ignored. A script's own handler is kept, and so is an
    ignored signal.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    handler = _Handler(shutdown_hook, is_for_good, is_own_signal, unless)
    for number in _ending_signals():
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, handler)


def is_handled() -> bool:
    """Whether SIGTERM has the handler of :func:`end_on_sigterm`. From any thread."""
    return isinstance(signal.getsignal(signal.SIGTERM), _Handler)


def _ending_signals() -> set[signal.Signals]:
    """The signals that end this process: those that a launcher passes on, or a terminal's.

    Without a launcher, Ctrl-C raises KeyboardInterrupt, as scripts expect.
    """
    signals = {signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
    if is_launched():
        signals.add(signal.SIGINT)
        names = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "").split(",")
        listed = {getattr(signal, name.strip(), None) for name in names}
        signals |= {number for number in listed if isinstance(number, signal.Signals)}
    return signals - {signal.SIGKILL, signal.SIGSTOP}


class _Handler:
    def __init__(
        self,
        shutdown_hook: Callable[[bool], object],
        is_for_good: Callable[[], bool],
        is_own_signal: Callable[[], bool],
        unless: Callable[[], bool],
    ) -> None:
        self._shutdown_hook = shutdown_hook
        self._is_for_good = is_for_good
        self._is_own_signal = is_own_signal
        self._unless = unless
        self._pid = os.getpid()

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked data worker has inherited the handler
            os._exit(EXIT_CODE)
        if signum == signal.SIGTERM and self._is_own_signal():
            return
        # On another thread: the interrupted main thread may hold the link's lock.
        threading.Thread(target=self._end, name="elastic-sigterm", daemon=True).start()

    def _end(self) -> None:
        if self._unless():
            return
        try:
            self._shutdown_hook(self._is_for_good())
        except BaseException:  # noqa: BLE001  logged, and the process ends
            get_logger().exception("saving at SIGTERM failed")
        finally:
            os._exit(EXIT_CODE)
