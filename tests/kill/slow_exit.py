"""A process with a slow exit: ptrace(2) holds its exit until it is released.

A process with hundreds of gigabytes of memory, or with a write to a busy disk, behaves the same. It
is killed, but exists: its pidfd is not readable, and its parent cannot reap it.
"""

from __future__ import annotations

import ctypes
import os
from types import TracebackType

from elastic.testing.waiting import eventually

_SEIZE, _CONT, _DETACH = 0x4206, 7, 17  # linux/ptrace.h
_TRACE_EXIT = 0x40


class SlowExit:
    """Delays the exit of process ``pid`` within the context. Use one thread only, as ptrace(2)
    requires.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._is_held = False

    def __enter__(self) -> SlowExit:
        self._ptrace(_SEIZE, _TRACE_EXIT)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_held:
            self._ptrace(_CONT)
            os.waitpid(self.pid, 0)  # as its tracer; its parent still has to reap it

    def wait_held(self) -> None:
        """Wait until the process was killed."""

        def is_held() -> bool:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            return pid == self.pid and os.WIFSTOPPED(status)

        eventually(is_held, f"the exit of process {self.pid}")
        self._is_held = True

    def _ptrace(self, request: int, data: int = 0) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
        libc.ptrace.restype = ctypes.c_long
        if libc.ptrace(request, self.pid, None, data) == -1:
            raise OSError(ctypes.get_errno(), f"ptrace({request:#x}, {self.pid})")
