"""The identity of a process, and whether another one still exists: proof of death on one machine.

A missing pid proves a death only in the process table that the pid was from: that of the same
kernel, since the same boot, in the same pid namespace. A reused pid is detected by its start time
in clock ticks (``/proc/<pid>/stat``, field 22). All of these properties must agree, since none of
them alone distinguishes two machines:

- the boot id is random for each boot of a kernel, and shared by all containers on it. Virtual
  machines that were cloned while they ran have the same one;
- the machine id is that of an installation: cloned disks and containers of one image share it,
  and in containers it is often empty, which proves nothing;
- the uid of a pod (``ELASTIC_POD_UID``, from the downward API) is unlike any other's, and empty
  where there are no pods. Two containers of one pod have it in common;
- the host name is arbitrary: equal ones prove nothing, different ones do;
- the inode of a pid namespace is unique on one kernel only: the first one has the same number
  everywhere.

If one of them differs, nothing is proved here, neither death nor life: the node's lease and its
port decide. A reboot of a machine proves nothing either: only its machine id would identify it, but
a clone has the same one.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from elastic.membership.records import ProcessDigest, ProcessIdentity

_MACHINE_ID = Path("/etc/machine-id")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def current_process(pod_uid: str = "") -> ProcessIdentity:
    """The identity of this process; ``pod_uid`` is that of its pod, if known."""
    pid = os.getpid()
    stat = _stat(pid)
    return ProcessIdentity(
        host=socket.gethostname(),
        machine_id=_read(_MACHINE_ID),
        boot_id=_read(_BOOT_ID),
        pod_uid=pod_uid,
        pid_namespace=_pid_namespace(),
        pid=pid,
        start_ticks=stat[1] if stat else 0,
    )


def proved_gone(process: ProcessDigest, me: ProcessIdentity) -> bool:
    """True if this machine can prove that ``process`` no longer runs; False proves nothing."""
    if not process.table or process.table != me.digest.table:
        return False
    stat = _stat(process.pid)
    if stat is None:
        return not _exists(process.pid)
    return stat[0] in "ZX" or (process.start_ticks > 0 and stat[1] != process.start_ticks)


def _pid_namespace() -> int:
    """The inode of this pid namespace; 0, which proves nothing, if ``/proc`` belongs to another."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return 0
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _exists(pid: int) -> bool:
    """Whether the process exists: ``/proc`` may hide the processes of other users (hidepid)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def _stat(pid: int) -> tuple[str, int] | None:
    """(state letter, start time in ticks), or None if no such process is visible."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The command name is in parentheses, and may itself contain spaces and parentheses.
    rest = text[text.rindex(")") + 2 :].split()
    return rest[0], int(rest[19])
