"""Folders and files of mode 0700 and 0600, in folders where others may write: ``/tmp``,
``/dev/shm``.

Another user may create names there beforehand, as a link to another place. So folders are always
new, files are created and never opened through a link, and files that are read must belong to this
user.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path

_MAX_BYTES = 16 << 20


def make_folder(prefix: str, *, base: str | None = None) -> str:
    """A new folder with an unpredictable name, of mode 0700."""
    return tempfile.mkdtemp(prefix=prefix, dir=base)


def make_folder_again(folder: str | os.PathLike[str]) -> None:
    """Create a folder of :func:`make_folder` again if it was removed.

    Raises PermissionError for one that others own or can enter: its name is known by now.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    found = os.lstat(folder)
    is_private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    if found.st_uid != os.geteuid() or not is_private:
        raise PermissionError(errno.EACCES, "others own it, or can enter it", os.fspath(folder))


def write(path: str | os.PathLike[str], data: bytes) -> None:
    """A new file of mode 0600. Raises FileExistsError if the name exists, even as a link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def read(path: str | os.PathLike[str]) -> bytes:
    """Read a private file. Raises OSError for a link, and for files that others own or can
    read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        require_private(descriptor, path)
        return file.read(_MAX_BYTES)


def open_lock(path: str | os.PathLike[str]) -> int:
    """Open a lock file of this user, or create it with mode 0600; returns its descriptor.

    Raises PermissionError for a link, or a file that others own or can change.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        if Path(path).is_symlink():
            raise PermissionError(f"{path} is a link: remove it, or set TMPDIR") from error
        raise
    try:
        require_private(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def require_private(descriptor: int, path: str | os.PathLike[str]) -> None:
    """Raises PermissionError unless it is a regular file that only this user can access."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        raise PermissionError(f"{path} is not a regular file: remove it, or set TMPDIR")
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{path} belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}, "
            f"expected user {os.geteuid()} and 600: remove it, or set TMPDIR"
        )
