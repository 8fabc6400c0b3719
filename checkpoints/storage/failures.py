"""Translates the ``OSError`` of a storage into an error with a cause and a remedy."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from checkpoints.errors import DiskFull, NotWritable, ReadFailed, WriteFailed

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ELOOP}


@contextlib.contextmanager
def writing(place: str) -> Iterator[None]:
    """Translate an ``OSError`` into a :class:`SaveError` with a remedy."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _FULL:
            raise DiskFull(
                f"no space to save into {place}: {reason}",
                hint="Free space or keep fewer checkpoints; older checkpoints are unchanged.",
            ) from error
        if error.errno in _REFUSED:
            raise NotWritable(
                f"cannot write into {place}: {reason}",
                hint="Use a folder that every writer has permission to write.",
            ) from error
        raise WriteFailed(
            f"writing into {place} failed: {reason}",
            hint="Older checkpoints are unchanged; the next save starts over.",
        ) from error


@contextlib.contextmanager
def reading(place: str) -> Iterator[None]:
    """Translate an ``OSError`` into :class:`ReadFailed`."""
    try:
        yield
    except OSError as error:
        raise ReadFailed(
            f"reading {place} failed: {error.strerror or error}",
            hint="Check the disk or the mount; latest() finds the newest readable checkpoint.",
        ) from error
