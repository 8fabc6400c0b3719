"""Which process is this, and is that one still there: proof of death on one host.

A pid alone proves nothing: pids are reused. Host name, boot, pid namespace, pid and the start
time in clock ticks (``/proc/<pid>/stat``, field 22) together name a process for ever.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from elastic.coordination.records import ProcessIdentity


def current_process() -> ProcessIdentity:
    """The identity of this process."""
    pid = os.getpid()
    stat = _stat(pid)
    return ProcessIdentity(
        host=socket.gethostname(),
        boot_id=_boot_id(),
        pid_namespace=os.stat("/proc/self/ns/pid").st_ino,
        pid=pid,
        start_ticks=stat[1] if stat else 0,
    )


def proved_gone(process: ProcessIdentity, me: ProcessIdentity) -> bool:
    """True if this host can prove that ``process`` no longer runs; False proves nothing."""
    if process.host != me.host:
        return False
    if process.boot_id != me.boot_id:
        return bool(process.boot_id and me.boot_id)
    if process.pid_namespace != me.pid_namespace:
        return False
    stat = _stat(process.pid)
    return stat is None or stat[0] in "ZX" or stat[1] != process.start_ticks


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, int] | None:
    """(state letter, start time in ticks), or None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command name stands in parentheses and may itself hold spaces and parentheses.
    rest = text[text.rindex(")") + 2 :].split()
    return rest[0], int(rest[19])
