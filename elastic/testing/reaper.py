"""Ends all descendants of a process once that process has ended for any reason.

A test or benchmark that is killed with SIGKILL cannot stop its agents, which would train
indefinitely. So it starts a reaper, a small process that waits for its end and then kills every
process with its mark in the environment. The mark is inherited, also by processes in other sessions
and those whose parent has died. Linux only: pidfd_open(2) and ``/proc``.

Run as ``python -m elastic.testing.reaper OWNER_PID MARK``.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import uuid

from elastic.errors import SYSTEM_CLOCK
from elastic.testing.processes import is_alive, kill_owned_by

# Not ELASTIC_…: benchmarks of plain torchrun remove such variables.
OWNERS = "TEST_PROCESS_OWNERS"
"""Environment variable with the marks of all processes that a process must not outlive."""

_POLL_S = 0.5
_mark = ""
_pid = 0  # the owner of the mark: a fork needs its own


def owners() -> str:
    """The value of :data:`OWNERS` for child processes. Starts the reaper on first use."""
    global _mark, _pid
    if _pid != os.getpid():
        _pid, _mark = os.getpid(), uuid.uuid4().hex
        _start(_mark)
    inherited = os.environ.get(OWNERS, "")
    return inherited if _mark in inherited.split(":") else f"{inherited}:{_mark}".strip(":")


def reap_descendants() -> None:
    """Ensure that no process started from now on outlives this one, except forks without exec."""
    os.environ[OWNERS] = owners()


def _start(mark: str) -> None:
    subprocess.Popen(
        [sys.executable, "-m", "elastic.testing.reaper", str(os.getpid()), mark],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the owner
    )


def main(owner: int, mark: str) -> None:
    """Wait for the owner's end, then kill all marked processes."""
    for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    try:
        select.select([os.pidfd_open(owner)], [], [])
    except ProcessLookupError:
        pass
    except (AttributeError, OSError):  # before Linux 5.3
        while is_alive(owner):
            SYSTEM_CLOCK.sleep(_POLL_S)
    kill_owned_by(OWNERS, mark)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
