"""A child process that starts immediately."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

import torch

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def fork(work: Callable[[], None]) -> int:
    """Run ``work`` in a fork of this warm process: a new one would import torch for seconds.

    It is killed when the thread that forked it ends.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent died before prctl
            os._exit(status)
        torch.set_num_threads(1)  # the parent's thread pool does not exist in a fork
        work()
        status = 0
    finally:
        os._exit(status)
