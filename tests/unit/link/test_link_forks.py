"""What a forked child does not inherit."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable

import pytest

from elastic.link import link
from elastic.testing.waiting import PATIENCE_S


def in_a_child(check: Callable[[], bool]) -> bool:
    pid = os.fork()
    if pid == 0:
        ok = False
        try:
            ok = check()
        finally:
            os._exit(0 if ok else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def is_null(fd: int) -> bool:
    return os.readlink(f"/proc/self/fd/{fd}") == os.devnull


def test_a_covered_socket_closes_although_a_forked_child_lives() -> None:
    ours, peers = socket.socketpair()
    link.cover([ours.fileno()])
    held, lets_go = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(lets_go)
        os.read(held, 1)  # lives until the parent lets go
        os._exit(0)
    try:
        link.uncover([ours.fileno()])
        ours.close()
        peers.settimeout(PATIENCE_S)
        assert peers.recv(1) == b""
    finally:
        os.close(lets_go)
        os.waitpid(pid, 0)
        os.close(held)
        peers.close()


def test_the_parent_keeps_a_covered_socket() -> None:
    ours, peers = socket.socketpair()
    with ours, peers:
        link.cover([ours.fileno()])
        assert in_a_child(lambda: is_null(ours.fileno()) and not is_null(peers.fileno()))
        ours.sendall(b"x")
        assert peers.recv(1) == b"x"
        link.uncover([ours.fileno()])
        assert in_a_child(lambda: not is_null(ours.fileno()))


def test_a_reused_descriptor_is_kept_in_the_child() -> None:
    ours, peers = socket.socketpair()
    fd = ours.fileno()
    link.cover([fd])
    ours.close()
    peers.close()
    successor, other = socket.socketpair()
    with successor, other:
        os.dup2(successor.fileno(), fd)
        assert in_a_child(lambda: not is_null(fd))
        if fd not in (successor.fileno(), other.fileno()):
            os.close(fd)
    link.uncover([fd])


def test_a_closed_descriptor_does_not_affect_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    gone, kept = socket.socketpair()
    link.cover([gone.fileno(), kept.fileno()])
    numbers = [gone.fileno(), kept.fileno()]
    gone.close()
    with kept:
        assert in_a_child(lambda: is_null(kept.fileno()))
    link.uncover(numbers)
    link.cover([numbers[0]])  # closed already: nothing to cover


def test_a_child_does_not_garbage_collect_its_parents_objects() -> None:
    """And the parent's collector keeps the script's settings."""
    link.cover([])
    gc.freeze()
    frozen = gc.get_freeze_count()
    later = [[number] for number in range(1000)]
    assert in_a_child(lambda: gc.isenabled() and gc.get_freeze_count() > frozen + 500)
    assert gc.isenabled() and frozen - 500 < gc.get_freeze_count() < frozen + 500
    assert len(later) == 1000
    gc.disable()
    try:
        assert in_a_child(lambda: not gc.isenabled())
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()
