"""Classifies the failures of a storage, and translates them into errors with a remedy.

Each call of a storage (:mod:`checkpoints.storage.protocol`) that fails raises one of three kinds of
``OSError``:

- :data:`ABSENT`: the storage was reached, and there is no such file or folder;
- *permanent* (:func:`is_permanent`): repeating the call has the same result, e.g. no permission;
- *transient*, any other: the call may succeed later, e.g. EIO, ESTALE or a timeout.

Only the first one says that something does not exist. A transient failure of a read is repeated by
:class:`~checkpoints.storage.patient.PatientStorage`.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from checkpoints.errors import DiskFull, NotWritable, ReadFailed, WriteFailed

ABSENT = (FileNotFoundError, NotADirectoryError)

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ELOOP}
# File systems over object stores respond with these to operations that they do not have.
_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOTTY}
_PERMANENT = _FULL | _REFUSED | _UNSUPPORTED | {errno.EISDIR, errno.ENAMETOOLONG}


def is_permanent(error: OSError) -> bool:
    """Whether repeating the call has the same result, until someone intervenes."""
    return isinstance(error, ABSENT) or error.errno in _PERMANENT


def is_transient(error: Exception | None) -> bool:
    """Whether an error of this package is of a storage that may work again a moment later."""
    cause = error.__cause__ if error is not None else None
    return isinstance(cause, OSError) and not is_permanent(cause)


def is_full(error: OSError) -> bool:
    """Whether there is no space."""
    return error.errno in _FULL


def is_unsupported(error: OSError) -> bool:
    """Whether the file system lacks the operation."""
    return error.errno in _UNSUPPORTED


def reason_of(error: OSError) -> str:
    """The failure in words."""
    return error.strerror or str(error) or type(error).__name__


@contextlib.contextmanager
def writing(place: str) -> Iterator[None]:
    """Translate an ``OSError`` into a :class:`SaveError` with a remedy."""
    try:
        yield
    except OSError as error:
        reason = reason_of(error)
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
            f"reading {place} failed: {reason_of(error)}",
            hint="Check the disk or the mount; latest() finds the newest readable checkpoint.",
        ) from error
