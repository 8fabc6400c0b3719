"""Runs a command that ends when its parent does: ``bound_to_parent.py PID COMMAND...``.

A launcher killed with SIGKILL cannot stop its nodes, so every local node asks the kernel
for SIGTERM on its parent's death. The setting survives execve (prctl(2)), so that it also works
for plain torchrun. It is set here rather than in ``preexec_fn``, which is not safe in a
process with threads. SIGTERM, not SIGKILL: the agent then stops its workers.

Run as a file, not as a module: it must not wait for this package's imports.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import NoReturn

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(argv: list[str]) -> NoReturn:
    """Bind this process to its parent, then exec the command."""
    parent, command = int(argv[0]), argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # the parent died before prctl
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
