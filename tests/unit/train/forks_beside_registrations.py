"""A script: data workers' first use of shared memory, forked while a thread takes glibc's lock.

Prints how many of the forked processes did not come to their end. ``--unprepared``: without what
the loader does before it forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import NoReturn

import torch
from torch.utils.data import DataLoader, TensorDataset

from elastic.train.loader import ElasticLoader

FORKS = 100
HANGS_S = 60.0  # of a process that needs a millisecond of a core, on a machine that others use
BETWEEN_LOOKS = 1000  # registrations, of less than a microsecond each


class Registrations:
    """What each thread does that uses a static of C++ for the first time, again and again.

    It pauses while nobody forks: a forked process would only be slower beside it.
    """

    def __init__(self) -> None:
        self._switched_on, self._has_begun = threading.Event(), threading.Event()
        threading.Thread(target=self._register, name="registrations", daemon=True).start()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """They run when the block begins, and pause soon after its end."""
        self._switched_on.set()
        self._has_begun.wait()
        yield
        self._switched_on.clear()
        self._has_begun.clear()

    def _register(self) -> None:
        libc = ctypes.CDLL(None)
        register = libc["__cxa_atexit"]
        harmless = ctypes.cast(libc.getpid, ctypes.c_void_p)
        while self._switched_on.wait():
            self._has_begun.set()
            for _ in range(BETWEEN_LOOKS):
                register(harmless, None, None)


def use_shared_memory_and_exit() -> NoReturn:
    """What a data worker does first, in collate and in a dataset."""
    torch.UntypedStorage._new_shared(64)  # type: ignore[no-untyped-call]
    torch.zeros(1).share_memory_()  # type: ignore[no-untyped-call]
    os._exit(0)


def comes_to_its_end(pid: int) -> bool:
    until_s = time.monotonic() + HANGS_S
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > until_s:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return False
        time.sleep(0.001)
    return True


def main() -> None:
    torch.set_num_threads(1)
    if "--unprepared" not in sys.argv:
        ElasticLoader(DataLoader(TensorDataset(torch.zeros(8)), 4, num_workers=1))
    registrations = Registrations()
    hangs = 0
    for _ in range(FORKS):
        with registrations.running():
            pid = os.fork()
            if pid == 0:  # it never leaves the block: the thread's events may have been locked
                use_shared_memory_and_exit()
        hangs += not comes_to_its_end(pid)
    print(hangs, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
