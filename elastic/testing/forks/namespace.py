"""``ip netns exec NAME command`` in a forked process, which enters the namespace itself."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

_LAUNCHER = ("ip", "netns", "exec")
_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000  # linux/sched.h
_MS_REC, _MS_SLAVE = 0x4000, 0x80000  # linux/mount.h
_MNT_DETACH = 2


def split(command: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """The network namespace of ``command`` ("": this one), and the command to run in it."""
    first, rest = tuple(command[:3]), tuple(command[4:])
    return (command[3], rest) if first == _LAUNCHER and rest else ("", tuple(command))


def enter(name: str) -> None:
    """Move this single-threaded process into a namespace of ``ip netns``.

    Like iproute2 (lib/namespace.c, ``netns_switch``), with separate mounts, because /sys shows the
    interfaces of the namespace in which it was mounted. Raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def check(failed: int, what: str) -> None:
        if failed:
            number = ctypes.get_errno()
            raise OSError(number, f"{what}: {os.strerror(number)}")

    fd = os.open(f"/run/netns/{name}", os.O_RDONLY | os.O_CLOEXEC)
    check(libc.setns(fd, _CLONE_NEWNET), f"setns to {name}")
    os.close(fd)
    check(libc.unshare(_CLONE_NEWNS), "unshare")
    check(libc.mount(b"", b"/", b"none", _MS_SLAVE | _MS_REC, None), "mount /")
    check(libc.umount2(b"/sys", _MNT_DETACH), "umount /sys")
    check(libc.mount(name.encode(), b"/sys", b"sysfs", 0, None), "mount /sys")
