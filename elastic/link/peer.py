"""The process at the other end of a unix socket, and its exit status, as the kernel reports
them."""

from __future__ import annotations

import os
import select
import socket
import struct
from dataclasses import dataclass

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


@dataclass(frozen=True)
class Peer:
    """The process that connected, or that listens, by SO_PEERCRED."""

    pid: int  # 0: in a pid namespace that is not visible to this process
    uid: int


def peer_of(sock: socket.socket) -> Peer:
    """The process at the other end of a connected unix socket."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return Peer(pid, uid)


def may_claim_pid(pid: int, claimed: int) -> bool:
    """Whether process ``pid`` may claim the id ``claimed``: its own, or its id in its pid
    namespace.

    ``NSpid`` of /proc/PID/status lists its ids from this namespace down to its own (proc(5)).
    """
    if pid == claimed:
        return True
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status:
            ids = next((line.split()[1:] for line in status if line.startswith("NSpid:")), [])
    except OSError:
        return False
    return len(ids) > 1 and ids[-1] == str(claimed)


def has_ended(pidfd: int) -> bool:
    """Whether that process has ended, or is a zombie."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def exit_status(pidfd: int) -> tuple[int | None, int | None]:
    """The exit code and the signal of a child that has ended; one of them is None. Does not reap
    it.

    Both are None if the process is not a child, or was reaped already.
    """
    try:
        info = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return None, None  # a shell's child, or reaped already
    if info is None:
        return None, None
    if info.si_code == os.CLD_EXITED:
        return info.si_status, None
    return None, info.si_status
