"""A job that swaps: its processes are in a separate cgroup, whose memory can be limited to less
than they use.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from training_job import TrainingJob

from elastic.testing.node import LocalNode

SWAP_BYTES = 4 << 30
_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_UNLIMITED = {"memory.limit_in_bytes": "-1", "memory.high": "max"}


def why_unavailable() -> str:
    """The reason why a job cannot swap on this machine; "" if it can."""
    if os.geteuid() != 0:
        return "swap space and cgroups need root"
    return "" if _root() is not None else "there is no memory cgroup"


def _root() -> Path | None:
    if (_V1 / "memory.limit_in_bytes").exists():
        return _V1
    control = _V2 / "cgroup.subtree_control"
    has_memory = control.exists() and "memory" in control.read_text().split()
    return _V2 if has_memory else None


@contextmanager
def swap_space(folder: Path) -> Iterator[None]:
    """A swap file in this folder."""
    path = folder / "swap"
    path.touch(mode=0o600)
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, SWAP_BYTES)
    subprocess.run(["mkswap", str(path)], check=True, capture_output=True)
    subprocess.run(["swapon", str(path)], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["swapoff", str(path)], check=True, capture_output=True)
        path.unlink()


class MemoryGroup:
    """A cgroup, of either version."""

    def __init__(self, name: str) -> None:
        root = _root()
        assert root is not None, why_unavailable()
        self._folder = root / name
        self._limit = "memory.limit_in_bytes" if root == _V1 else "memory.high"
        self._folder.mkdir()

    @property
    def launcher(self) -> tuple[str, ...]:
        """Starts a command in it."""
        return ("sh", "-c", f'echo $$ > {self._folder}/cgroup.procs && exec "$@"', "sh")

    def limit_to(self, share: float) -> None:
        """Limit the memory of its processes: the rest, and the page cache of files, is swapped to
        disk and read back on demand.
        """
        own_bytes = self._stat("rss", "anon")
        with suppress(OSError):  # EBUSY: not all of it could be reclaimed at once
            (self._folder / self._limit).write_text(str(int(share * own_bytes)))

    def major_faults(self) -> int:
        """Pages that its processes have read from the disk so far."""
        return self._stat("pgmajfault")

    def _stat(self, *names: str) -> int:
        """The first of these names that the kernel knows: they differ by version."""
        lines = (self._folder / "memory.stat").read_text().splitlines()
        found = dict(line.split(" ", 1) for line in lines)
        return int(next(found[name] for name in names if name in found))

    def lift_limit(self) -> None:
        """Remove the limit."""
        (self._folder / self._limit).write_text(_UNLIMITED[self._limit])

    def close(self) -> None:
        """Call after its processes have ended."""
        with suppress(OSError):  # it still contains a zombie: an empty folder is harmless
            self._folder.rmdir()


class SwappingJob(TrainingJob):
    """A job whose agents and workers are in one MemoryGroup."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        # A fork server's children share its memory, which is not in the group.
        super().__init__(*args, fork_server=None, **settings)
        self.memory = MemoryGroup(f"elastic-swapping-{os.getpid()}")

    def start_node(self, name: str | None = None, **settings: Any) -> LocalNode:
        return super().start_node(name, launcher=self.memory.launcher, **settings)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.memory.close()
