"""The process at the other end of a unix socket, and how it ended, from the kernel."""

from __future__ import annotations

import os
import select
import socket
import struct
from dataclasses import dataclass

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


@dataclass(frozen=True)
class Peer:
    """The process that connected, or that listened, by SO_PEERCRED."""

    pid: int  # 0: in a pid namespace that cannot be seen from here
    uid: int


def peer_of(sock: socket.socket) -> Peer:
    """The other end of a connected unix socket."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return Peer(pid, uid)


def calls_itself(pid: int, claimed: int) -> bool:
    """Whether process ``pid`` may claim to be ``claimed``: in another pid namespace it may.

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


def how_it_ended(pidfd: int) -> tuple[int | None, int | None]:
    """Exit code or signal of a child that has ended, leaving it to its parent to reap."""
    try:
        info = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return None, None  # started by a shell, or reaped already
    if info is None:
        return None, None
    if info.si_code == os.CLD_EXITED:
        return info.si_status, None
    return None, info.si_status
