"""Signs of life of a long call without steps: a checkpoint that is read and verified.

Its duration grows with its size, so no time limit suits it. What tells a slow call from a hung one
is whether its threads run: a read that returns bytes takes CPU time to copy them, and a hash more.
A thread that is blocked takes none.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator

from elastic.hangs.phases import phases
from elastic.tuning.worker_intervals import BUSY_POLL_S

THREAD_NAME = "elastic-busy"


@contextlib.contextmanager
def busy(helpers: str = "", progressed: Callable[[], object] = phases.progressed) -> Iterator[None]:
    """While the block runs on this thread, report progress whenever this thread, or one whose name
    begins with ``helpers``, has used CPU time. The block enters no other phase."""
    ended = threading.Event()
    watcher = threading.Thread(
        target=_watch,
        args=(threading.get_native_id(), helpers, progressed, ended),
        name=THREAD_NAME,
        daemon=True,
    )
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _watch(
    caller: int, helpers: str, progressed: Callable[[], object], ended: threading.Event
) -> None:
    before: dict[int, int] = {}
    while not ended.wait(BUSY_POLL_S):
        threads = {caller}
        if helpers:
            threads |= {
                thread.native_id
                for thread in threading.enumerate()
                if thread.name.startswith(helpers) and thread.native_id is not None
            }
        used = {thread: cpu_ticks(thread) for thread in threads}
        if any(ticks > before.get(thread, 0) for thread, ticks in used.items()):
            progressed()
        before = used


def cpu_ticks(native_id: int) -> int:
    """The CPU time of a thread of this process, in clock ticks (10 ms); 0 if it has ended.

    Not by ``time.pthread_getcpuclockid``, whose behaviour is undefined for a thread that has ended.
    """
    try:
        with open(f"/proc/{os.getpid()}/task/{native_id}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name may contain anything
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])  # utime, stime: fields 14 and 15 of proc(5)
