"""A worker checks its node's memory limit once, when the size of a checkpoint is known."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from elastic.telemetry.log import get_logger
from elastic.tuning.memory import staging_shortage


def resident_bytes() -> int:
    """Warns once per process if a checkpoint does not fit into memory."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


class MemoryLimit:
    """Read ``ELASTIC_MEMORY_LIMIT_BYTES``, checked by the agent; without it there is no
    warning."""

    def __init__(
        self, environ: Mapping[str, str] = os.environ, used: Callable[[], int] = resident_bytes
    ) -> None:
        limit = environ.get("ELASTIC_MEMORY_LIMIT_BYTES", "")
        self._limit_bytes = int(limit) if limit.isdecimal() else None
        self._local_size = int(environ.get("LOCAL_WORLD_SIZE", "1"))
        self._used = used

    def saw_share(self, share_bytes: int, world_size: int) -> None:
        """Check one rank's share of a checkpoint in a world of that size. Warns once."""
        if self._limit_bytes is None:
            return
        said = staging_shortage(
            self._limit_bytes, self._used(), share_bytes, world_size, self._local_size
        )
        if said is not None:
            get_logger().warning("%s", said)
            self._limit_bytes = None
