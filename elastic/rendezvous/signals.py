"""The launching program's own signal handlers: replaced while a launch runs, and restored after it.

torch installs handlers with every start of workers and never removes them, and in the meantime
SIGTERM is handled by this package (leaving.py). In torchrun nothing runs after the launch; a
program that calls ``elastic_launch`` continues, and must react to signals as before.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from elastic.rendezvous import torch_private

_Handler = Callable[[int, FrameType | None], object] | int | None


class ProgramSignals:
    """The handlers at the time of its creation. Only the main thread handles signals: on another
    thread nothing is replaced, and so nothing is saved."""

    def __init__(self) -> None:
        names = {"SIGTERM", *torch_private.handled_signals()}
        numbers = {getattr(signal, name, None) for name in names} if _is_main_thread() else set()
        self._kept: dict[int, _Handler] = {
            number: signal.getsignal(number) for number in numbers if number is not None
        }
        self._names = os.environ.get(torch_private.SIGNALS_VARIABLE)

    def restore(self) -> None:
        """Install the handlers again. Has no effect on other threads than the main one."""
        if not _is_main_thread():
            return
        for number, handler in self._kept.items():
            if handler is not None:  # None: not installed from Python, which cannot restore it
                signal.signal(number, handler)
        if self._names is not None:
            os.environ[torch_private.SIGNALS_VARIABLE] = self._names

    def after_fork(self, ours: object, *, is_worker: bool) -> None:
        """In a forked child: without ``ours``, the launch's handler of SIGTERM.

        A worker gets the handlers of a new process, so that it ends on torch's SIGTERM. Other forks
        of the program get the program's handlers.
        """
        handler = signal.getsignal(signal.SIGTERM)
        if is_worker and callable(handler):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        elif handler is ours and (kept := self._kept.get(signal.SIGTERM)) is not None:
            signal.signal(signal.SIGTERM, kept)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
