"""From an ``OSError`` of a storage to the error that says what happened and what to do."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from checkpoints.errors import DiskFull, NotWritable, ReadFailed, WriteFailed

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ELOOP}


@contextlib.contextmanager
def writing(place: str) -> Iterator[None]:
    """Turn an ``OSError`` into the error that says what to do about it."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _FULL:
            raise DiskFull(
                f"no room to save into {place}: {reason}",
                hint="Free space or keep fewer checkpoints; the older ones are untouched.",
            ) from error
        if error.errno in _REFUSED:
            raise NotWritable(
                f"cannot write into {place}: {reason}",
                hint="Give a folder that every writer may write.",
            ) from error
        raise WriteFailed(
            f"writing into {place} failed: {reason}",
            hint="The older checkpoints are untouched; the next save starts anew.",
        ) from error


@contextlib.contextmanager
def reading(place: str) -> Iterator[None]:
    """Turn an ``OSError`` into :class:`ReadFailed`."""
    try:
        yield
    except OSError as error:
        raise ReadFailed(
            f"reading {place} failed: {error.strerror or error}",
            hint="Check the disk or the mount; latest() finds the newest that can be read.",
        ) from error
