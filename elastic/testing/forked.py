"""A child process, ready at once."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch


def fork(work: Callable[[], None]) -> int:
    """Run ``work`` in a fork of this warm process: a fresh one would import torch for seconds."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        torch.set_num_threads(1)  # the parent's pool of threads did not come along
        work()
        status = 0
    finally:
        os._exit(status)
