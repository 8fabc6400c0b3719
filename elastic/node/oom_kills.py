"""Whether the kernel's OOM killer has ended a process of this agent's cgroup.

A SIGKILL does not identify its sender. The kernel counts its own in the memory cgroup: ``oom_kill``
in ``memory.events`` (cgroup v2), or in ``memory.oom_control`` (v1, Linux 4.13 and later). v1's
``memory.failcnt`` is no evidence: it also increases when the kernel only dropped its file cache.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path

OOM_KILL = "the kernel killed it because the memory limit of its cgroup was reached"

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class OomKillCounter:
    """The kernel's count of OOM kills, read after a worker's death by SIGKILL. Thread-safe.

    The workers are in the cgroup of the agent, which has started them. Several agents may share
    one: a kill among the workers of one counts for both, if both observe a SIGKILL.
    """

    def __init__(self, cgroups: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> None:
        self._files = _files(cgroups, membership)
        self._lock = threading.Lock()
        self._seen = self._count()

    def mark(self) -> None:
        """Ignore the kills so far: workers are about to start."""
        with self._lock:
            self._seen = self._count()

    def has_killed(self) -> bool:
        """Whether there was a kill since the last call of this or of :meth:`mark`."""
        with self._lock:
            before, self._seen = self._seen, self._count()
            return before is not None and self._seen is not None and self._seen > before

    def _count(self) -> int | None:
        """None: not available from the kernel."""
        for path in self._files:
            try:
                found = _COUNT.search(path.read_text(encoding="ascii", errors="replace"))
            except OSError:
                continue
            if found is not None:
                return int(found.group(1))
        return None


def _files(cgroups: Path, membership: Path) -> tuple[Path, ...]:
    """Possible files of the count, the most likely one first. In a container the path of the cgroup
    may be the host's, while the container's own is mounted."""
    try:
        lines = membership.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    files: list[Path] = []
    for line in lines:  # "0::/path" (v2), "4:memory:/path" (v1)
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            folder, name = cgroups, "memory.events"
        elif "memory" in controllers.split(","):
            folder, name = cgroups / "memory", "memory.oom_control"
        else:
            continue
        files += [folder / path.strip("/") / name, folder / name]
    return tuple(files)
