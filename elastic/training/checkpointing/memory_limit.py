"""Checks the node's memory limit in a worker, once the size of a checkpoint is known."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from elastic.telemetry.log import get_logger
from elastic.tuning.memory import staging_shortage


def resident_bytes() -> int:
    """The resident memory of this process."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


class MemoryLimit:
    """Warns once per process if a checkpoint does not fit into memory. Reads
    ``ELASTIC_MEMORY_LIMIT_BYTES``, which the agent has checked; without it, never warns."""

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
        shortage = staging_shortage(
            self._limit_bytes, self._used(), share_bytes, world_size, self._local_size
        )
        if shortage is not None:
            get_logger().warning("%s", shortage)
            self._limit_bytes = None
