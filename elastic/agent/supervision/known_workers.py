"""The state of each worker process of a node, by process id."""

from __future__ import annotations

from elastic.link.replicas import LocalReplicas
from elastic.link.server import LinkServer, Worker


class KnownWorkers:
    """Filled from the workers' messages on their links; used by the node's thread."""

    def __init__(self, server: LinkServer) -> None:
        self._server = server
        self.ready: set[int] = set()  # they can change worlds without a restart
        self.left: set[int] = set()  # they have left the job at a step boundary
        self.entered: dict[int, int] = {}  # pid to generation
        self.starts: dict[int, int] = {}  # pid to the number of the start that it belongs to
        self.ended: set[int] = set()  # they failed or were killed by this agent; end not reported
        self.failed: set[int] = set()  # of them, those that announced their end with an error
        self.hung: dict[int, str] = {}  # pid to the reason why this agent ends it
        self.replicas = LocalReplicas()
        # The time left to workers that are meeting the other ranks of their replica on this node,
        # by pid; and those that have met them.
        self.meeting_left_s: dict[int, float] = {}
        self.met: set[int] = set()

    @property
    def present(self) -> set[int]:
        """The pids of workers with a link that take part in the job."""
        return {worker.pid for worker in self._server.workers()} - self.ended

    @property
    def have_left(self) -> bool:
        """Whether all present workers have left the job."""
        return bool(self.left) and self.present <= self.left

    def end(self, worker: Worker) -> None:
        """Count the process as ended from now on, although its end may take a while."""
        self.ended.add(worker.pid)
        self.ready.discard(worker.pid)
        self.entered.pop(worker.pid, None)
        self.replicas.leave(worker.pid)
        self.meeting_left_s.pop(worker.pid, None)
        self.met.discard(worker.pid)

    def drop(self, worker: Worker) -> None:
        """Remove a process that has ended."""
        self.end(worker)
        self.ended.discard(worker.pid)
        self.failed.discard(worker.pid)
        self.left.discard(worker.pid)
        self.starts.pop(worker.pid, None)
        self.hung.pop(worker.pid, None)

    def forget(self) -> None:
        """Reset the state when all workers are restarted."""
        self.ready.clear()
        self.left.clear()
        self.entered.clear()
