"""Which workers of this node together hold the model: if one dies, all are replaced."""

from __future__ import annotations

from elastic.link.server import Worker


class LocalReplicas:
    """The replicas on one node, as its workers announce them: consecutive local ranks. If a
    replica spans several nodes, all workers of this node belong to it."""

    def __init__(self) -> None:
        self._joined: dict[int, tuple[Worker, int]] = {}  # by pid, with the replica's size

    def join(self, worker: Worker, size: int, nproc: int | None = None) -> tuple[Worker, ...]:
        """Register a worker. Returns all workers of its replica on this node once they are present,
        else none. ``nproc``: the number of workers on this node."""
        self._joined[worker.pid] = worker, size
        members = (worker, *self.siblings(worker.pid))
        places = {member.local_rank % size for member in members}
        return members if len(places) == min(size, nproc or size) else ()

    def has_joined(self, pid: int) -> bool:
        """Whether the worker has announced itself."""
        return pid in self._joined

    def siblings(self, pid: int) -> tuple[Worker, ...]:
        """The other workers in this worker's replica; none if each rank is a replica."""
        if pid not in self._joined:
            return ()
        worker, size = self._joined[pid]
        return tuple(
            other
            for other, other_size in self._joined.values()
            if other.pid != pid
            and other_size == size
            and other.local_rank // size == worker.local_rank // size
        )

    def leave(self, pid: int) -> None:
        """Remove a worker whose process has ended."""
        self._joined.pop(pid, None)
