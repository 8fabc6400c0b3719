"""Sockets that a forked child must not keep, because it would hide its parent's death from the
peers.

A data worker forked from a training process inherits all its sockets. After the parent's SIGKILL
they stay open until the child ends: peers and the agent detected the death after 5 s with idle
data workers, and not within 40 s with busy ones [measured]. The child therefore replaces them
with /dev/null.

A child must not collect the parent's garbage either: if it contains a process group, the group's
destructor joins threads that the child does not have, and the child dies of SIGSEGV [measured].
Objects that exist at the fork are therefore excluded from the child's collector. (In the parent
nothing is frozen: unfreezing would undo the script's own ``gc.freeze()``.)
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterable

_covered: dict[int, tuple[int, int]] = {}  # fd -> its device and inode
_is_installed = False
_collector = threading.local()  # ``was_enabled``: whether the collector was on


def cover(fds: Iterable[int]) -> None:
    """From now on, forked children have /dev/null instead of these sockets."""
    global _is_installed
    for fd in fds:
        try:
            _covered[fd] = _identity(fd)
        except OSError:
            continue  # closed in the meantime
    if not _is_installed:
        os.register_at_fork(
            before=_pause_collector, after_in_parent=_restore_collector, after_in_child=_in_child
        )
        _is_installed = True


def uncover(fds: Iterable[int]) -> None:
    """Stop replacing these sockets, which are closed, or which a child may inherit again."""
    for fd in fds:
        _covered.pop(fd, None)


def _pause_collector() -> None:
    # Until the child has frozen its parent's objects.
    _collector.was_enabled = gc.isenabled()
    gc.disable()


def _restore_collector() -> None:
    if _collector.was_enabled:
        gc.enable()


def _in_child() -> None:
    gc.freeze()
    _restore_collector()
    _replace_sockets()


def _replace_sockets() -> None:
    # In a forked child of a threaded process: no locks, no logging, nothing that may fail.
    if not _covered:
        return
    try:
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return  # no descriptor is free
    for fd, identity in list(_covered.items()):
        try:
            if _identity(fd) == identity:  # otherwise closed in the meantime, and its number reused
                os.dup2(null, fd, inheritable=False)
        except OSError:
            continue
    os.close(null)
    _covered.clear()


def _identity(fd: int) -> tuple[int, int]:
    stat = os.fstat(fd)
    return stat.st_dev, stat.st_ino
