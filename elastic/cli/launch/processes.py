"""Process trees on this machine, read from /proc, which needs no dependency on psutil."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path


def tree(root: int) -> tuple[int, ...]:
    """``root`` and its living descendants, parents first; empty if it has ended.

    Independent of sessions and process groups: torchrun gives each worker its own.
    """
    children: dict[int, list[int]] = {}
    alive: set[int] = set()
    for pid, parent in _parents():
        alive.add(pid)
        children.setdefault(parent, []).append(pid)
    found = [root] if root in alive else []
    for pid in found:  # grows during the loop: breadth first
        found.extend(children.get(pid, ()))
    return tuple(found)


def kill_tree(root: int) -> tuple[int, ...]:
    """SIGKILL ``root`` and all its descendants, as a failure of the machine; returns their pids.

    The root is stopped first, so that it can neither start children nor clean up after them.
    """
    send([root], signal.SIGSTOP)
    pids = tree(root)
    send(pids, signal.SIGKILL)
    return pids


def send(pids: Iterable[int], signum: int) -> None:
    """Send a signal to each process that still exists."""
    for pid in pids:
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            pass


def _parents() -> Iterable[tuple[int, int]]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:  # it ended meanwhile
            continue
        state, parent = stat.rpartition(")")[2].split()[:2]  # a name may contain anything
        if state not in "ZX":
            yield int(entry.name), int(parent)
