"""Is a folder in memory? Reading twice is then cheap, and cannot fail the second time."""

from __future__ import annotations

import os
from pathlib import Path

from checkpoints.storage import LocalStorage, Storage

_IN_MEMORY = {"tmpfs", "ramfs"}
_MOUNTS = Path("/proc/self/mountinfo")


def in_memory(storage: Storage) -> bool:
    """Whether a storage is a folder on a tmpfs; False where that cannot be known."""
    if not isinstance(storage, LocalStorage):
        return False
    try:
        device = os.stat(storage.place).st_dev
        lines = _MOUNTS.read_text().splitlines()
    except OSError:
        return False
    wanted = f"{os.major(device)}:{os.minor(device)}"
    # proc_pid_mountinfo(5): the third field is the device, the type follows a lone hyphen.
    return any(
        line.split()[2] == wanted and line.partition(" - ")[2].split()[0] in _IN_MEMORY
        for line in lines
    )
