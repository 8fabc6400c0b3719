"""Whether two processes have the same files before them: one kernel's, which reads them once."""

from __future__ import annotations

import os
from pathlib import Path

from checkpoints.storage.local import LocalStorage
from checkpoints.storage.protocol import Storage

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def page_cache_identity(storage: Storage, name: str) -> str | None:
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
