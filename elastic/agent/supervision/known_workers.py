"""A node's data about each of its workers' processes, by process id."""

from __future__ import annotations

from elastic.link.replicas import LocalReplicas
from elastic.link.server import LinkServer, Worker


class KnownWorkers:
    """Filled from the workers' messages on their links; for the node's thread."""

    def __init__(self, server: LinkServer) -> None:
        self._server = server
        self.ready: set[int] = set()  # they can change worlds without a restart
        self.left: set[int] = set()  # they have left the job at a step boundary
        self.entered: dict[int, int] = {}  # pid to generation
        self.starts: dict[int, int] = {}  # pid to the start of workers that it belongs to
        self.hung: dict[int, str] = {}  # pids that this agent ends, and the reason
        self.replicas = LocalReplicas()

    @property
    def present(self) -> set[int]:
        """The pids of workers with a link."""
        return {worker.pid for worker in self._server.workers()}

    @property
    def have_left(self) -> bool:
        """Whether all present workers have left the job."""
        return bool(self.left) and self.present <= self.left

    def drop(self, worker: Worker) -> None:
        """The process has ended."""
        self.ready.discard(worker.pid)
        self.left.discard(worker.pid)
        self.entered.pop(worker.pid, None)
        self.starts.pop(worker.pid, None)
        self.hung.pop(worker.pid, None)
        self.replicas.leave(worker.pid)

    def forget(self) -> None:
        """All workers are restarted."""
        self.ready.clear()
        self.left.clear()
        self.entered.clear()
