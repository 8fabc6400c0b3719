"""A mounted file system whose daemon answers nothing but the mount: who touches it, blocks."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

_MNT_FORCE, _MNT_DETACH = 1, 2  # the first ends the requests of those that wait
# linux/fuse.h: the answer to FUSE_INIT, version 7.31 without any feature.
_INIT = struct.pack("<4I2H2I2H8I", 7, 31, 0, 0, 1, 1, 4096, 1, 1, 0, *[0] * 8)


@contextlib.contextmanager
def mounted(path: Path, *, takes_requests: bool = False) -> Iterator[Path]:
    """On a new folder at ``path``, for the time of the block; then who waits gets an error. Skips
    the test where this process may not mount.

    ``takes_requests``: who waits is in state D, and SIGKILL does not end it (fs/fuse/dev.c).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    path.mkdir()
    try:
        fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        pytest.skip(f"/dev/fuse: {error.strerror}")
    try:
        options = f"fd={fd},rootmode=40000,user_id=0,group_id=0".encode()
        if libc.mount(b"silent", bytes(path), b"fuse.silent", 0, options) != 0:
            pytest.skip(f"mount: {os.strerror(ctypes.get_errno())}")
        try:
            unique = struct.unpack_from("<Q", os.read(fd, 1 << 16), 8)[0]
            os.write(fd, struct.pack("<IiQ", 16 + len(_INIT), 0, unique) + _INIT)
            if takes_requests:
                threading.Thread(target=_take, args=(fd,), name="silent-fuse", daemon=True).start()
            yield path
        finally:
            libc.umount2(bytes(path), _MNT_FORCE | _MNT_DETACH)
    finally:
        os.close(fd)


def _take(fd: int) -> None:
    with contextlib.suppress(OSError):  # unmounted
        while True:
            os.read(fd, 1 << 17)
