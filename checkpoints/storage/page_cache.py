"""Whether two processes read the same files through one kernel, and so share its page cache."""

from __future__ import annotations

import os
from pathlib import Path

from checkpoints.storage.local import LocalStorage
from checkpoints.storage.patient import PatientStorage
from checkpoints.storage.protocol import Storage

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def page_cache_identity(storage: Storage, name: str) -> str | None:
    """An identity that processes share if they read the same files of a checkpoint through one
    kernel, regardless of the folder's path; None if that cannot be determined.

    Virtual machines started from one snapshot share a boot id, so the host name is part of it.
    """
    if isinstance(storage, PatientStorage):
        storage = storage.inner
    if not isinstance(storage, LocalStorage):
        return None
    try:
        folder = os.stat(Path(storage.place) / name)
        kernel = f"{_BOOT.read_text().strip()} {os.uname().nodename}"
        return f"{kernel} {folder.st_dev} {folder.st_ino}"
    except OSError:
        return None
