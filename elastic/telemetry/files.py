"""Files that other processes read while they are replaced."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file for the block to write, which then takes the place of ``path``: readers find the old
    content or the new. If the block fails, it is removed: on a full disk, others lack its space.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        yield new
        new.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # report the first failure
            new.unlink()
        raise
