"""A tier in the memory of this node, which outlives the processes that write into it.

It is a folder on a tmpfs such as ``/dev/shm``, created by a process that outlives the writers (an
agent, a launcher)::

    <folder>/own/       parts written by this node's ranks
    <folder>/copies/    replicas of another node's parts, written by its agent
    <folder>/node.json  addresses of the other nodes' memory; written by the agent

No node holds all parts, so nothing is ever committed here:
:class:`~checkpoints.loading.tiered_storage.TieredStorage` finds the complete checkpoints. Memory is
bounded. A tmpfs accepts writes until the kernel kills a process, so every write first checks how
many bytes the folder's limit, the tmpfs, the machine and the cgroup still allow.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path

from checkpoints.format.names import CheckpointName, parse_attempt, parse_part_file
from checkpoints.policies.retention import RetentionFunction, to_remove
from checkpoints.storage.failures import reason_of
from checkpoints.storage.local import LocalStorage
from checkpoints.storage.protocol import WritableFile

OWN = "own"
COPIES = "copies"
# Reserved for other processes, regardless of the limit.
RESERVE_BYTES = 256 << 20
_RECHECK_BYTES = 64 << 20


class NodeMemory(LocalStorage):
    """A storage of parts in memory; nothing is committed in it.

    The ``keep`` of a save decides which parts to retain: use at least the three newest, since ranks
    write independently and a checkpoint needs the parts of all ranks. ``room`` returns how many
    bytes may be added, and what limits them.
    """

    is_volatile = True

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        limit_bytes: int | None = None,
        room: Callable[[Path, int | None], tuple[int, str]] | None = None,
    ) -> None:
        super().__init__(folder)
        self._folder = Path(folder)
        self._limit_bytes = limit_bytes
        self._room = room or available_bytes_in

    def create(self, path: str) -> WritableFile:
        return _BoundedSink(super().create(path), self.room)

    def room(self) -> tuple[int, str]:
        """How many bytes may be added, and what limits them."""
        return self._room(self._folder, self._limit_bytes)

    def names(self) -> list[CheckpointName]:
        """The checkpoints that have complete parts here, newest first."""
        found = [name for name in self._attempts() if self._has_part(name)]
        return sorted(found, key=lambda name: name.age_order, reverse=True)

    def make_room(self, name: CheckpointName, size_bytes: int) -> None:
        """Remove older parts, oldest first, until ``size_bytes`` more fit; none if they never fit.

        The newest older part is spared, unless the limit leaves no room for a second one: after a
        shrink of the world, the memory would otherwise stay full of parts that nothing completes.
        """
        older = sorted(
            (other for other in self._attempts() if other.age_order < name.age_order),
            key=lambda other: other.age_order,
        )
        sizes = {other: used_bytes(self._folder / other.attempt) for other in older}
        if self._limit_bytes is None or size_bytes + sum(sizes.values()) <= self._limit_bytes:
            older = older[:-1]
        left_bytes, _ = self.room()
        if left_bytes + sum(sizes[other] for other in older) < size_bytes:
            return
        for other in older:
            if self.room()[0] >= size_bytes:
                return
            self.remove_folder(other.attempt)

    def remove_if_empty(self, name: CheckpointName) -> None:
        """Remove the folder of a checkpoint, unless it has files."""
        with contextlib.suppress(OSError):
            os.rmdir(self._folder / name.attempt)

    def _attempts(self) -> list[CheckpointName]:
        with contextlib.suppress(FileNotFoundError):
            return [name for name in map(parse_attempt, self.list("")) if name is not None]
        return []

    def _has_part(self, name: CheckpointName) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return any(parse_part_file(file) is not None for file in self.list(name.attempt))
        return False

    def part_written(self, name: CheckpointName, keep: RetentionFunction | None) -> tuple[str, ...]:
        """Remove the parts that ``keep`` does not retain; returns notes."""
        try:
            kept = self.names()
            for old in to_remove(kept, keep) if keep is not None else ():
                if old != name:
                    self.remove_folder(old.attempt)
                    kept.remove(old)
            oldest = kept[-1].age_order if kept else name.age_order
            for other in self._attempts():  # the rest of failed writes
                if other.age_order < oldest:
                    self.remove_folder(other.attempt)
        except OSError as error:
            return (f"{name} is stored, but removing older parts failed: {reason_of(error)}",)
        except Exception as error:  # noqa: BLE001  of the user's policy
            return (f"{name} is stored, but removing older parts failed: {error!r}",)
        return ()


class _BoundedSink:
    """Raises ENOSPC before the memory that other processes need is used up."""

    def __init__(self, inner: WritableFile, room: Callable[[], tuple[int, str]]) -> None:
        self._inner = inner
        self._room = room
        self._allowed = 0

    def write(self, data: bytes | memoryview) -> None:
        size = memoryview(data).nbytes
        if size > self._allowed:
            left, bound = self._room()
            if size > left:
                raise OSError(errno.ENOSPC, f"{bound} allows {max(left, 0)} of {size} bytes")
            self._allowed = min(left, max(size, _RECHECK_BYTES))
        self._allowed -= size
        self._inner.write(data)

    def sync(self) -> None:
        self._inner.sync()

    def close(self) -> None:
        self._inner.close()


def available_bytes_in(folder: Path, limit_bytes: int | None) -> tuple[int, str]:
    """Bytes that may be added to a folder in memory, and what limits them."""
    bounds = [
        (_free(folder), f"the file system of {folder}"),
        (_available() - RESERVE_BYTES, f"the machine's memory, less {RESERVE_BYTES >> 20} MiB,"),
        (_cgroup_left() - RESERVE_BYTES, f"the cgroup's memory, less {RESERVE_BYTES >> 20} MiB,"),
    ]
    if limit_bytes is not None:
        bounds.append((limit_bytes - used_bytes(folder), f"the limit of {limit_bytes} bytes"))
    return min(bounds)


def used_bytes(folder: Path) -> int:
    """The size of all files below a folder; tolerates files that are removed concurrently."""
    total = 0
    for root, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(root, file)).st_size
    return total


_UNBOUNDED = 1 << 62


def _free(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _available() -> int:
    """MemAvailable of /proc/meminfo: memory available without swapping."""
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo", "rb") as lines:
        for line in lines:
            if line.startswith(b"MemAvailable:"):
                return int(line.split()[1]) << 10
    return _UNBOUNDED


def _cgroup_left(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that the limits of this process's cgroup still allow; tmpfs pages count towards them.

    The page cache of files is reclaimable; pages of a tmpfs are not.
    """
    left = [_left_in(folder, "memory.max", "memory.current") for folder in _cgroups(root)]
    version_1 = _left_in(root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
    return min([*left, version_1])


def _cgroups(root: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                own = Path(line[3:].strip("/"))
                return [root / own, *(root / parent for parent in own.parents)]
    return [root]


def _left_in(folder: Path, limit_file: str, usage_file: str) -> int:
    try:
        limit, used = ((folder / name).read_text().strip() for name in (limit_file, usage_file))
        if limit == "max":
            return _UNBOUNDED
        return int(limit) - int(used) + _reclaimable(folder / "memory.stat")
    except (OSError, ValueError):
        return _UNBOUNDED


def _reclaimable(statistics: Path) -> int:
    with contextlib.suppress(OSError, ValueError):
        fields = dict(line.split() for line in statistics.read_text().splitlines())
        return int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))
    return 0
