"""``bound_to_parent.py PID command`` of ``elastic run`` and ``elastic demo`` in a forked process,
which binds itself to its parent (elastic/cli/bound_to_parent.py).
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Sequence
from pathlib import Path

_LAUNCHER = "bound_to_parent.py"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def split(command: Sequence[str]) -> tuple[int, tuple[str, ...]]:
    """The parent whose end must end this process (0: none), and the command."""
    if len(command) > 4 and Path(command[2]).name == _LAUNCHER:
        return int(command[3]), tuple(command[4:])
    return 0, tuple(command)


def bind(parent: int) -> None:
    """Send SIGTERM to this process when its parent ends; exits if the parent has already ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
