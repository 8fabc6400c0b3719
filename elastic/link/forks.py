"""Sockets that a forked child must not keep, because it would hide its parent's death from the
peers.

A data worker forked from a training process inherits all its sockets. After the parent's SIGKILL
they remain open until the child ends: peers and agent detected the death after 5 s with idle data
workers, and not within 40 s with busy ones [measured]. So in the child they are replaced by
/dev/null.

Also garbage that a child must not collect: if it contains a process group, its destructor joins
threads that the child does not have, and the child dies of SIGSEGV [measured]. So the parent's
objects at the fork are excluded from the child's collector. (In the parent nothing is frozen:
thawing would undo the script's own ``gc.freeze()``.)
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterable

_covered: dict[int, tuple[int, int]] = {}  # fd to the device and inode it had
_is_installed = False
_of_this_fork = threading.local()  # its ``collects``: whether the collector was on


def cover(fds: Iterable[int]) -> None:
    """From now on, forked children get /dev/null in the place of these sockets."""
    global _is_installed
    for fd in fds:
        try:
            _covered[fd] = _identity(fd)
        except OSError:
            continue  # closed in the meantime
    if not _is_installed:
        os.register_at_fork(
            before=_stop_collecting, after_in_parent=_collect_again, after_in_child=_in_child
        )
        _is_installed = True


def uncover(fds: Iterable[int]) -> None:
    """These are closed, or are the child's business again."""
    for fd in fds:
        _covered.pop(fd, None)


def _stop_collecting() -> None:
    # Until the child has frozen its parent's objects.
    _of_this_fork.collects = gc.isenabled()
    gc.disable()


def _collect_again() -> None:
    if _of_this_fork.collects:
        gc.enable()


def _in_child() -> None:
    gc.freeze()
    _collect_again()
    _lay_null()


def _lay_null() -> None:
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
    found = os.fstat(fd)
    return found.st_dev, found.st_ino
