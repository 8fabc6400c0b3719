"""Where files are: in memory, where reading twice is cheap and cannot fail the second time; or
under one kernel with those of another process, which reads them out of memory then, too."""

from __future__ import annotations

import os
from pathlib import Path

from checkpoints.storage import LocalStorage, Storage

_IN_MEMORY = {"tmpfs", "ramfs"}
_MOUNTS = Path("/proc/self/mountinfo")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


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


def identity_of(storage: Storage, name: str) -> str | None:
    """The same for two processes if they read the same files of a checkpoint through one kernel,
    whatever they call the folder; None where that cannot be known.

    Virtual machines started from one snapshot have one boot id: their names tell them apart.
    """
    if not isinstance(storage, LocalStorage):
        return None
    try:
        folder = os.stat(Path(storage.place) / name)
        kernel = f"{_BOOT.read_text().strip()} {os.uname().nodename}"
        return f"{kernel} {folder.st_dev} {folder.st_ino}"
    except OSError:
        return None
