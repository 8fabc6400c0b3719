"""The launching program's own signal handlers: replaced while a launch runs, and restored after it.

While a launch runs, this package handles every signal on which torch closes (leaving.py). A signal
that is ignored when the launch begins stays ignored, so that ``nohup`` protects an agent: torch
would install its handler for it. In torchrun nothing runs after the launch; a program that calls
``elastic_launch`` continues, and must react to signals as before.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from elastic.rendezvous import torch_private
from elastic.telemetry.log import get_logger

_Handler = Callable[[int, FrameType | None], object] | int | None


class ProgramSignals:
    """The handlers at the time of its creation. Only the main thread handles signals: on another
    thread nothing is replaced, and so nothing is saved."""

    def __init__(self) -> None:
        names = {"SIGTERM", *torch_private.handled_signals()}
        numbers = {_signal_number(name) for name in names} if _is_main_thread() else set()
        self._kept: dict[int, _Handler] = {
            number: signal.getsignal(number) for number in numbers if number is not None
        }
        self._names = os.environ.get(torch_private.SIGNALS_VARIABLE)

    def handle(self, handler: Callable[[int, FrameType | None], object]) -> None:
        """Have ``handler`` called for each signal that was not ignored, and keep torch from
        installing its own. Idempotent; without effect on other threads than the main one."""
        if not _is_main_thread():
            return
        torch_private.install_no_handlers()
        for number, kept in self._kept.items():
            if kept is not signal.SIG_IGN and signal.getsignal(number) != handler:
                signal.signal(number, handler)

    def restore(self) -> None:
        """Install the handlers again. Has no effect on other threads than the main one."""
        if not _is_main_thread():
            return
        for number, handler in self._kept.items():
            if handler is not None:  # None: not installed from Python, which cannot restore it
                signal.signal(number, handler)
        if self._names is not None:
            os.environ[torch_private.SIGNALS_VARIABLE] = self._names
        else:
            os.environ.pop(torch_private.SIGNALS_VARIABLE, None)

    def after_fork(self, ours: object, *, is_worker: bool) -> None:
        """In a forked child: without ``ours``, the launch's handler.

        A worker gets the handlers of a new process, so that it ends on torch's SIGTERM. Other forks
        of the program get the program's handlers.
        """
        if is_worker and callable(signal.getsignal(signal.SIGTERM)):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number, kept in self._kept.items():
            if signal.getsignal(number) is ours and kept is not None:
                signal.signal(number, _of_new_process(number) if is_worker else kept)


def _signal_number(name: str) -> int | None:
    """The number of a signal that a process can handle; None, with a warning, for another name."""
    number = getattr(signal, name, None)
    if isinstance(number, signal.Signals) and number not in (signal.SIGKILL, signal.SIGSTOP):
        return number
    get_logger().warning(
        "--signals-to-handle: %r is not a signal that a process can handle, and is omitted", name
    )
    return None


def _of_new_process(number: int) -> _Handler:
    return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
