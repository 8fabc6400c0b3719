"""Memory that ``/proc`` shows as this process's arguments or environment: proc(5)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path


class Area:
    """One such area. ``fields``: of ``/proc/self/stat``, with its start and end."""

    def __init__(self, fields: tuple[int, int]) -> None:
        stat = Path("/proc/self/stat").read_text()
        values = stat[stat.rindex(")") + 2 :].split()  # the third field first
        self.start, end = (int(values[field - 3]) for field in fields)
        self.size = end - self.start

    def show(self, strings: Sequence[str], *, is_whole: bool = False) -> None:
        """Write strings, truncated to the area; raises ValueError instead if ``is_whole``."""
        block = b"".join(os.fsencode(text) + b"\0" for text in strings)
        if is_whole and len(block) > self.size:
            raise ValueError(f"{len(block)} bytes do not fit into {self.size}")
        ctypes.memmove(self.start, block[: self.size - 1].ljust(self.size, b"\0"), self.size)
